"""Conversion of nanoGPT's GPT: its blocks replaced, its class extended."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, TypeVar

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
from .wiring import check_forward

GPT = TypeVar("GPT", bound=nn.Module)

OF_THE_MODEL = ("norm_eps", "norm_affine", "device", "dtype")
KNOWN = (
    *("value_channels", "start", "anneal_steps", "disable"),
    *(name for name in STREAM_OPTIONS | RESIDUAL_OPTIONS if name not in OF_THE_MODEL),
)


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
    check_options_of(options, KNOWN, OF_THE_MODEL, "ddl.nanogpt.convert")
    stream = stream_for(sublayers_of(blocks), weight, weight.dtype, norm_eps=None, **options)
    if disable:
        return False
    annealing = None if anneal_steps is None else Annealing(anneal_steps, device=weight.device)
    _replace(blocks, stream, annealing)
    all_options = {**options, "start": start, "anneal_steps": anneal_steps}
    model.delta_args = with_defaults(all_options, stream, OF_THE_MODEL)
    count_steps(model)
    return True


def check_options_of(
    options: dict[str, Any], known: tuple[str, ...], of_the_model: tuple[str, ...], caller: str
) -> None:
    """Raise TypeError for an option that the model sets itself, or that there is not."""
    for name in of_the_model:
        if name in options:
            raise TypeError(f"`{name}` must be left to the model, got {options[name]!r}")
    check_known(options, known, caller)


def check_additive(*, value_channels: Any, read_init: Any = None, **_: Any) -> None:
    """Raise ValueError for a read that is not the mean, by which a start with additions changes."""
    if read_init is not None and read_init * value_channels != 1:
        refuse("read_init", 'left out with start="additive"', read_init, ("start",))


def sublayers_of(blocks: Any) -> list[nn.Module]:
    """Attention and MLP of every block, in order."""
    return [sublayer for block in blocks for sublayer in (block.attn, block.mlp)]


def stream_for(
    sublayers: list[nn.Module], like: Tensor, dtype: torch.dtype, **options: Any
) -> DeltaStream:
    """The stream whose parts a model gets, with parameters of a dtype, where `like` is.

    like: (…, d). torch's random state is left unchanged.
    """
    with torch.random.fork_rng(devices=[]):  # parameters are drawn on the CPU for any device
        stream = DeltaStream(like.shape[-1], sublayers, device="cpu", dtype=dtype, **options)
    for part in (stream.expand, stream.reads, stream.residuals, stream.readout):
        part.to(like.device)
    return stream


def with_defaults(
    options: dict[str, Any], stream: DeltaStream, of_the_model: tuple[str, ...]
) -> dict[str, Any]:
    """The options of a conversion, those left at their defaults included."""
    known = {name: o.default for name, o in (STREAM_OPTIONS | RESIDUAL_OPTIONS).items()}
    known = {name: default for name, default in known.items() if name not in of_the_model}
    known |= options
    known |= {"compress": stream.reads[0].compress, "eps_k": stream.residuals[0].eps_k}
    # NumPy's numbers become Python's: torch.load(weights_only=True) refuses others in a checkpoint.
    return {n: v.item() if hasattr(v, "item") else v for n, v in known.items()}


def _replace(blocks: Any, stream: DeltaStream, annealing: Annealing | None) -> None:
    """Put a DeltaBlock with its parts of `stream` in place of every block."""
    for i, block in enumerate(blocks):
        blocks[i] = DeltaBlock(
            block,
            (stream.reads[2 * i], stream.reads[2 * i + 1]),
            (stream.residuals[2 * i], stream.residuals[2 * i + 1]),
            expand=stream.expand if i == 0 else None,
            anneal=annealing if i == 0 else None,
            readout=stream.readout if i == len(blocks) - 1 else None,
            anchor_every=stream.anchor_every,
            sublayers=len(stream.sublayers),
            stream_dtype=stream.stream_dtype,
        )


def check_model(
    model: Any,
    whose: str,
    needed: tuple[tuple[str, ...], tuple[str, ...]],
    block_modules: tuple[str, ...],
    formula: str,
    expected: Callable[..., Tensor],
) -> None:
    """Raise unless `model` has the modules of another project's GPT and is not converted yet.

    needed: the modules of the model, and of its `transformer`, whose blocks have `block_modules`
    and compute `formula`, as the function `expected` does.
    """
    if not isinstance(model, nn.Module):
        got = type(model).__name__
        if isinstance(model, type):
            got = f"the class {model.__name__}: `converted` takes a class"
        raise TypeError(f"`model` must be {whose}'s GPT, got {got}")
    if isinstance(model, WithOptions) and model.delta_args:
        raise ValueError(f"`model` must be {whose}'s GPT as it was made, got one already converted")
    _check_has("model", model, needed[0], whose)
    transformer: Any = model.transformer
    _check_has("model.transformer", transformer, needed[1], whose)
    listed = isinstance(transformer.h, nn.ModuleList)
    if not listed or len(transformer.h) == 0:
        got = "an empty one" if listed else type(transformer.h).__name__
        raise TypeError(f"`model.transformer.h` must be a ModuleList of blocks, got {got}")
    for i, block in enumerate(transformer.h):
        name = f"model.transformer.h[{i}]"
        _check_has(name, block, block_modules, whose)
        for other in (*block._modules, *block._parameters, *block._buffers):
            if other not in block_modules:
                known = ", ".join(block_modules)
                raise TypeError(f"`{name}` must have {known} and nothing else, got `{other}`")
        check_forward(name, block, transformer.wte.weight.shape[-1], formula, expected)


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


def _check_has(name: str, module: nn.Module, children: tuple[str, ...], whose: str) -> None:
    """Raise TypeError unless a module has children, as another project's model has them."""
    for child in children:
        if child not in module._modules:
            raise TypeError(
                f"`{name}` must have a module `{child}`, as in {whose}'s GPT before "
                f"torch.compile or DDP wraps it, got a {type(module).__name__} without it"
            )
