"""Conversion of nanoGPT's GPT: its blocks replaced, its class extended."""

from __future__ import annotations

from functools import cache
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor, nn

from ddl.nn.stream import DeltaStream
from ddl.optim import NEVER_DECAYED
from ddl.options import Compress, ExpandKind, check_choice, check_count, refuse

from .annealing import Annealing, anneal
from .block import BLOCK, DeltaBlock

__all__ = ["convert"]

GPT = TypeVar("GPT", bound=nn.Module)


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
    of the optimizer that `configure_optimizers` returns, or for which `anneal` was called. Gradient
    accumulation counts once. In the first step gates and values get a gradient of zero, then one
    that grows with a, which Adam rescales; compressions and a convolving expansion learn from the
    start, as does what was there before. The steps are counted in the state dict, as
    `transformer.h.0.anneal.step`, so that a resumed run goes on where it was. `eval` and `generate`
    use the a of the moment. At a = 1 the model is the one without `start`, to the bit; until then
    every state is stored, whatever `anchor_every` says. An average of weights (EMA) has to copy
    this buffer, too.

    Args:
        model: nanoGPT's GPT, or a model with the same `transformer` and blocks.
        value_channels, compress, expand: as in DeltaStream.
        start: "additive" to start as the model with additions; None for rewrites from the start.
        anneal_steps: optimizer steps until every addition has become a rewrite; needed and allowed
            only with `start`.
        disable: leave the model unchanged, so that one flag switches an A/B comparison. Wrong
            arguments still raise.
        options: further options of DeltaStream, including those of DeltaResidual. norm_eps, device
            and dtype are not allowed: the model sets them.

    Raises:
        TypeError: `model` lacks modules of nanoGPT's GPT or has others; an option is unknown.
        ValueError: `model` is already converted; DeltaStream refuses an option; `start` or
            `anneal_steps` is unknown, missing or out of range.
    """
    _check_model(model)
    _check_start(start, anneal_steps)
    for name in ("norm_eps", "device", "dtype"):
        if name in options:
            raise TypeError(f"`{name}` must be left to the model, got {options[name]!r}")
    transformer: Any = model.transformer
    weight, blocks = transformer.wte.weight, transformer.h
    with torch.random.fork_rng(devices=[]):  # parameters are drawn on the CPU for any device
        stream = DeltaStream(
            weight.shape[1],
            [sublayer for block in blocks for sublayer in (block.attn, block.mlp)],
            value_channels=value_channels,
            compress=compress,
            expand=expand,
            norm_eps=None,
            device="cpu",
            dtype=weight.dtype,
            **options,
        )
    if disable:
        return model
    stream.to(weight.device)
    annealing = None if anneal_steps is None else Annealing(anneal_steps, device=weight.device)
    _replace(blocks, stream, annealing)
    kind: Any = type(model)
    model.__class__ = _converted(kind)
    return model


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
            stream_dtype=stream.stream_dtype,
        )


class _Converted(nn.Module):
    """Mixin that `convert` puts before the class of a model."""

    def configure_optimizers(self, *args: Any, **kwargs: Any) -> Any:
        """Run nanoGPT's method on nanoGPT's parameters, then add the new ones without decay.

        If the model starts with additions, the optimizer's steps are those that `convert` counts.
        """
        modules = [module for module in self.modules() if isinstance(module, NEVER_DECAYED)]
        new = {p: None for module in modules for p in module.parameters() if p.requires_grad}
        for parameter in new:
            parameter.requires_grad_(False)  # nanoGPT's method skips parameters without gradient
        try:
            optimizer = super().configure_optimizers(*args, **kwargs)  # type: ignore[misc]
        finally:
            for parameter in new:
                parameter.requires_grad_(True)
        for group in optimizer.param_groups:  # a method of one's own may not skip them
            group["params"] = [p for p in group["params"] if p not in new]
        optimizer.add_param_group({"params": list(new), "weight_decay": 0.0})
        if any(isinstance(module, Annealing) for module in self.modules()):
            anneal(self, optimizer)
        return optimizer

    def logits_of_state(self, state: Tensor) -> Tensor:
        """Map a state X (B, T, d, m) of the stream to logits (B, T, V), as after the last block.

        For one value channel the state is (B, T, d, 1).
        """
        transformer: Any = self.transformer
        read: Any = transformer.h[-1].readout
        x = transformer.ln_f(read(state.squeeze(-1) if state.shape[-1] == 1 else state))
        return self.lm_head(x)  # type: ignore[operator]

    def __reduce__(self) -> Any:
        """Let pickle rebuild the class: it cannot import one that was made at run time."""
        return _blank, (type(self).__bases__[1],), self.__dict__


@cache
def _converted(kind: Any) -> Any:
    return type(f"Delta{kind.__name__}", (_Converted, kind), {"__doc__": kind.__doc__})


def _blank(kind: Any) -> Any:
    converted = _converted(kind)
    return converted.__new__(converted)


def _check_model(model: Any) -> None:
    """Raise unless `model` has the modules of nanoGPT's GPT and is not converted yet."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"`model` must be nanoGPT's GPT, got {type(model).__name__}")
    if isinstance(model, _Converted):
        raise ValueError("`model` must be nanoGPT's GPT as it was made, got one already converted")
    _check_has("model", model, ("transformer",))
    transformer: Any = model.transformer
    _check_has("model.transformer", transformer, ("wte", "h", "ln_f"))
    listed = isinstance(transformer.h, nn.ModuleList)
    if not listed or len(transformer.h) == 0:
        got = "an empty one" if listed else type(transformer.h).__name__
        raise TypeError(f"`model.transformer.h` must be a ModuleList of blocks, got {got}")
    for i, block in enumerate(transformer.h):
        name = f"model.transformer.h[{i}]"
        _check_has(name, block, BLOCK)
        for other in (*block._modules, *block._parameters, *block._buffers):
            if other not in BLOCK:
                known = ", ".join(BLOCK)
                raise TypeError(f"`{name}` must have {known} and nothing else, got `{other}`")


def _check_start(start: Any, anneal_steps: Any) -> None:
    """Raise unless both are given, or neither."""
    check_choice("start", start, ("additive",), optional=True)
    if start is not None:
        check_count("anneal_steps", anneal_steps)
    elif anneal_steps is not None:
        refuse("anneal_steps", 'left at None unless start="additive"', anneal_steps)


def _check_has(name: str, module: nn.Module, children: tuple[str, ...]) -> None:
    for child in children:
        if child not in module._modules:
            raise TypeError(
                f"`{name}` must have a module `{child}`, as in nanoGPT's GPT before torch.compile "
                f"or DDP wraps it, got a {type(module).__name__} without it"
            )
