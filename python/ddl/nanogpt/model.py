"""Conversion of nanoGPT's GPT: its blocks replaced, its class extended."""

from __future__ import annotations

from contextvars import ContextVar
from typing import Any, ClassVar, Literal, TypeVar

import torch
from torch import Tensor, nn

from ddl.nn.stream import DeltaStream
from ddl.options import (
    RESIDUAL_OPTIONS,
    STREAM_OPTIONS,
    Compress,
    ExpandKind,
    check_choice,
    check_count,
    check_known,
    refuse,
)

from .annealing import Annealing, count_steps
from .block import BLOCK, DeltaBlock
from .mixin import Converted, WithOptions, derived
from .wiring import check_model

GPT = TypeVar("GPT", bound=nn.Module)
Class = TypeVar("Class", bound=type[nn.Module])

OWN = ("start", "anneal_steps", "disable")
FIXED = {"norm_eps": None, "norm_affine": True}
_PLAIN: ContextVar[bool] = ContextVar("plain", default=False)  # True in `from_pretrained`


def convert(
    model: GPT,
    *,
    value_channels: int = 1,
    compress: Compress | None = None,
    expand: ExpandKind = "repeat",
    start: Literal["additive"] | None = None,
    anneal_steps: int | None = None,
    disable: bool = False,
    **options: Any,
) -> GPT:
    """Turn every residual addition of nanoGPT's GPT into a rewrite, in place, and return `model`.

    Call it before `load_state_dict` of a converted checkpoint, before `configure_optimizers` and
    before torch.compile or DDP wraps the model.

    Every entry of the state dict keeps its name and its numbers. Each block in `transformer.h`
    gains gates and values (`res_attn`, `res_mlp`) and compressions (`read_attn`, `read_mlp`); if
    they have parameters, `expand` is new in the first block and `readout` in the last. New
    parameters are initialised as in DeltaStream. torch's random state is left unchanged, so the
    converted model and the original see the same batches and dropout masks. `configure_optimizers`
    puts the new parameters into a third group, without weight decay.

    A model that was trained with additions computes another function after conversion. With
    start="additive" it computes the same one at first, to rounding, and reaches the rewrites step
    by step: with F the sublayer's output (the k of a k-Map), every write is

        X' = X + (1 − a) F 1ᵀ + aβ k̂ (vᵀ − k̂ᵀX)

    (aβ_j in each of several rewrites) and a grows from 0 to 1, linearly, over `anneal_steps` steps
    of any torch optimizer that trains parameters of the model. Gradient accumulation counts once,
    and so do several optimizers that step one after the other. In the first step gates and values
    get a gradient of zero, then one that grows with a, which Adam rescales; compressions and a
    convolving expansion learn from the start, as does what was there before. The steps are counted
    in the state dict, as `transformer.h.0.anneal.step`, so that a resumed run goes on where it was.
    `eval` and `generate` use the a of the moment. At a = 1 the model is the one without `start`, to
    the bit; until then every state is stored, whatever `anchor_every` says. An average of weights
    (EMA) has to copy this buffer, too.

    Args:
        model: nanoGPT's GPT, or a model with the same `transformer` and blocks.
        value_channels, compress, expand: as in DeltaStream.
        start: "additive" to start as the model with additions; None for rewrites from the start.
        anneal_steps: optimizer steps until every addition has become a rewrite; needed and allowed
            only with `start`.
        disable: leave the model unchanged, so that one flag switches an A/B comparison. Wrong
            arguments still raise.
        options: further options of DeltaStream, including those of DeltaResidual. norm_eps,
            norm_affine, device and dtype are not allowed: the model sets them.

    Raises:
        TypeError: `model` lacks modules of nanoGPT's GPT or has others; a block's forward computes
            something else; an option is unknown.
        ValueError: `model` is already converted; DeltaStream refuses an option; `start` or
            `anneal_steps` is unknown, missing or out of range; with `start`, `read_init` is not the
            mean.
    """
    options |= {"value_channels": value_channels, "compress": compress, "expand": expand}
    if rewrite_blocks(model, start=start, anneal_steps=anneal_steps, disable=disable, **options):
        model.__class__ = derived(type(model), Converted, f"Delta{type(model).__name__}")
    return model


def converted(kind: Class, *, disable: bool = False, **options: Any) -> Class:
    """Return a subclass of nanoGPT's GPT whose models are converted when they are made.

        GPT = ddl.nanogpt.converted(GPT, value_channels=4)  # at the end of model.py

    A model of it is what `convert(GPT(config), **options)` returns, and is an instance of `kind`.
    So whatever makes a GPT and then loads a state dict goes on working: train.py with
    --init_from=resume, and sample.py. `from_pretrained` loads GPT-2's weights into a model of
    `kind` and converts it; with start="additive" the result starts as GPT-2.

    kind: the class, whose models `convert` accepts. disable: return `kind` itself. options: as in
    `convert`; they are checked when a model is made.

    Raises:
        TypeError: `kind` is no class of modules. ValueError: it is already converted.
    """
    return converted_class(kind, _ConvertedWhenMade, "nanoGPT", disable, options)


class _ConvertedWhenMade(Converted):
    """Mixin that converts a model at the end of its class's `__init__`."""

    options: ClassVar[dict[str, Any]]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if not _PLAIN.get():
            rewrite_blocks(self, **self.options)

    @classmethod
    def from_pretrained(cls, *args: Any, **kwargs: Any) -> Any:
        """Make and fill the plain model, as nanoGPT does, then convert it."""
        before = _PLAIN.set(True)  # nanoGPT expects as many parameters as GPT-2 has
        try:
            model = super().from_pretrained(*args, **kwargs)  # type: ignore[misc]
        finally:
            _PLAIN.reset(before)
        rewrite_blocks(model, **cls.options)
        model.__class__ = cls  # nanoGPT makes a GPT by name, which may be the plain class
        return model


def converted_class(
    kind: Class, mixin: type, whose: str, disable: bool, options: dict[str, Any]
) -> Class:
    """Return the subclass of another project's GPT whose models the mixin converts."""
    if not (isinstance(kind, type) and issubclass(kind, nn.Module)):
        got = f"an object of class {type(kind).__name__}: `convert` takes a model"
        raise TypeError(f"`kind` must be {whose}'s class GPT, got {got}")
    if issubclass(kind, WithOptions):
        raise ValueError(f"`kind` must be {whose}'s class GPT, got one already converted")
    options = {"value_channels": 1, "compress": None, "expand": "repeat", **options}
    made: Class = derived(kind, mixin, "", tuple(sorted(options.items())))
    return kind if disable else made


def rewrite_blocks(
    model: Any,
    *,
    start: Literal["additive"] | None = None,
    anneal_steps: int | None = None,
    disable: bool = False,
    **options: Any,
) -> bool:
    """Replace the blocks of `model`, as `convert` does, and leave its class as it is.

    Returns whether they were replaced: not if `disable`.
    """
    formula = "x + attn(ln_1(x)), then x + mlp(ln_2(x))"
    check_model(model, "nanoGPT", (("transformer",), ("wte", "h", "ln_f")), BLOCK, formula, _added)
    _check_start(start, anneal_steps)
    if start is not None:
        check_additive(**options)
    blocks, weight = model.transformer.h, model.transformer.wte.weight
    stream, known = stream_for(
        sublayers_of(blocks),
        {**options, "start": start, "anneal_steps": anneal_steps},
        like=weight,
        dtype=weight.dtype,
        own=OWN,
        fixed=FIXED,
        caller="ddl.nanogpt.convert",
    )
    if disable:
        return False
    annealing = None if anneal_steps is None else Annealing(anneal_steps, device=weight.device)
    for number, block in enumerate(blocks):
        blocks[number] = DeltaBlock(block, number, stream, annealing)
    model.delta_args = known
    count_steps(model)
    return True


def check_additive(*, value_channels: Any, read_init: Any = None, **_: Any) -> None:
    """Raise ValueError for a read that is not the mean, by which a start with additions changes."""
    if read_init is not None and read_init * value_channels != 1:
        refuse("read_init", 'left out with start="additive"', read_init, ("start",))


def sublayers_of(blocks: Any) -> list[nn.Module]:
    """Attention and MLP of every block, in order."""
    return [sublayer for block in blocks for sublayer in (block.attn, block.mlp)]


def stream_for(
    sublayers: list[nn.Module],
    options: dict[str, Any],
    *,
    like: Tensor,
    dtype: torch.dtype,
    own: tuple[str, ...],
    fixed: dict[str, Any],
    caller: str,
) -> tuple[DeltaStream, dict[str, Any]]:
    """The stream whose parts a model gets, and all options of the conversion, defaults included.

    like: (…, d), a tensor on the device of the parameters, which get `dtype`. own: the caller's
    options besides the stream's. fixed: the stream's that the model sets. torch's random state is
    left unchanged. Raises TypeError for an option that is fixed or unknown.
    """
    for name in (*fixed, "device", "dtype"):
        if name in options:
            raise TypeError(f"`{name}` must be left to the model, got {options[name]!r}")
    known = {n: o.default for n, o in (STREAM_OPTIONS | RESIDUAL_OPTIONS).items() if n not in fixed}
    check_known(options, ("value_channels", *own, *known), caller)
    given = {name: value for name, value in options.items() if name not in own}
    with torch.random.fork_rng(devices=[]):  # parameters are drawn on the CPU for any device
        stream = DeltaStream(like.shape[-1], sublayers, device="cpu", dtype=dtype, **fixed, **given)
    for part in (stream.expand, stream.reads, stream.residuals, stream.readout):
        part.to(like.device)
    known |= options
    known |= {"compress": stream.reads[0].compress, "eps_k": stream.residuals[0].eps_k}
    # NumPy's numbers become Python's: torch.load(weights_only=True) refuses others in a checkpoint.
    return stream, {n: v.item() if hasattr(v, "item") else v for n, v in known.items()}


def _added(block: Any, x: Tensor, *_: Any) -> Tensor:
    """The forward of nanoGPT's Block, whose modules get x alone."""
    x = x + block.attn(block.ln_1(x))
    added: Tensor = x + block.mlp(block.ln_2(x))
    return added


def _check_start(start: Any, anneal_steps: Any) -> None:
    """Raise unless both are given, or neither."""
    check_choice("start", start, ("additive",), optional=True)
    if start is not None:
        check_count("anneal_steps", anneal_steps)
    elif anneal_steps is not None:
        refuse("anneal_steps", 'left at None unless start="additive"', anneal_steps, ("start",))
