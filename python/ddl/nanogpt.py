"""nanoGPT's GPT on a delta stream: every residual addition becomes a rewrite.

    model = ddl.nanogpt.convert(model, value_channels=4)

Only the blocks change. Embeddings, attention, MLP, LayerNorms and head stay the same modules under
the same names, and the model's `forward` stays: it passes each block's output to the next block.
Between two blocks that output is a `Pending` write instead of a tensor, so that the next block's
read is fused with it.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from ddl import functional
from ddl.nn.checks import require_exact_type
from ddl.nn.expand import Expand
from ddl.nn.read import Read
from ddl.nn.residual import DeltaResidual
from ddl.nn.stream import DeltaStream, as_stream
from ddl.optim import NEVER_DECAYED
from ddl.options import Compress, ExpandKind, StreamDtype
from ddl.results import Chain

__all__ = ["DeltaBlock", "Pending", "convert"]

GPT = TypeVar("GPT", bound=nn.Module)

BLOCK = ("ln_1", "attn", "ln_2", "mlp")  # every module in nanoGPT's Block


class Pending(NamedTuple):
    """A state and a rewrite of it that has not been applied yet: it is fused with the next read.

    state: X (B, T, d, m). direction: k (B, T, d). value: v (B, T, m). gate: β (B, T).
    eps_k: ε_k, in units of |k|. chain: the rewrites since the last state that is stored; None
    outside of training.
    """

    state: Tensor
    direction: Tensor
    value: Tensor
    gate: Tensor
    eps_k: float
    chain: Chain | None


class DeltaBlock(nn.Module):
    """nanoGPT's Block with a rewrite in place of each addition; it keeps ln_1, attn, ln_2 and mlp.

        h = ln_1(read_attn(X))
        X = res_attn(X, attn(h), context=h)
        h = ln_2(read_mlp(X))
        X = res_mlp(X, mlp(h), context=h)

    The fused reads skip their norm: nanoGPT's LayerNorm turns the raw read into the context h, and
    value and gate are computed from h. The first block expands the embeddings (B, T, d); the last
    one returns the readout (B, T, d), which ln_f normalises. As in DeltaStream, the fused operators
    read the parameters of reads and residuals directly and never call their `forward`.
    """

    def __init__(
        self,
        block: Any,
        reads: Sequence[Any],
        residuals: Sequence[Any],
        *,
        expand: Expand | None,
        readout: Read | None,
        anchor_every: int,
        stream_dtype: StreamDtype | None,
    ) -> None:
        super().__init__()
        self.ln_1, self.attn, self.ln_2, self.mlp = (getattr(block, name) for name in BLOCK)
        self.read_attn, self.read_mlp = reads
        self.res_attn, self.res_mlp = residuals
        self.expand, self.readout = expand, readout
        self.anchor_every, self.stream_dtype = anchor_every, stream_dtype
        self.train(block.training)

    def forward(self, x: Tensor | Pending) -> Tensor | Pending:
        """Run one block: embeddings or a `Pending` write in, a `Pending` write or the readout out.

        x: (B, T, d) for the first block, the previous block's `Pending` for the others.
        Returns the readout (B, T, d) from the last block, a `Pending` from the others.
        Raises TypeError if a block other than the first gets a tensor, or a read or residual is
        wrapped.
        """
        read_attn = require_exact_type("read_attn", self.read_attn, Read)
        read_mlp = require_exact_type("read_mlp", self.read_mlp, Read)
        res_attn = require_exact_type("res_attn", self.res_attn, DeltaResidual)
        res_mlp = require_exact_type("res_mlp", self.res_mlp, DeltaResidual)
        reading = self._open(x, read_attn) if isinstance(x, Tensor) else _advance(x, read_attn)
        reading = _advance(_sublayer(reading, self.ln_1, self.attn, res_attn), read_mlp)
        pending = _sublayer(reading, self.ln_2, self.mlp, res_mlp)
        if self.readout is None:
            return pending
        return _advance(pending, require_exact_type("readout", self.readout, Read)).x

    def _open(self, x: Tensor, read: Read) -> _Reading:
        """Expand embeddings (B, T, d) to the first state and read it."""
        if self.expand is None:
            raise TypeError("`x` must be what the block before returned, got a Tensor")
        state = self.expand(as_stream(x, self.stream_dtype))
        state = state.unsqueeze(-1) if read.value_channels == 1 else state
        if read.compress == "identity":
            return _Reading(state, state.squeeze(-1), None)
        weight, dtype = read.effective_weight(), state.dtype
        result = functional.read(state, compress=weight, norm_eps=None, context_dtype=dtype)
        stores_less = self.anchor_every > 1 and torch.is_grad_enabled()
        return _Reading(state, result.context, Chain(self.anchor_every) if stores_less else None)


class _Reading(NamedTuple):
    """A state X (B, T, d, m), its raw read x (B, T, d), and the rewrites that led to X."""

    state: Tensor
    x: Tensor
    chain: Chain | None


def _sublayer(
    reading: _Reading, norm: nn.Module, sublayer: nn.Module, residual: DeltaResidual
) -> Pending:
    """Run the sublayer on norm(x); return its pending rewrite of X."""
    state, x, chain = reading
    h = norm(x)
    value, gate = residual.value_and_gate(state, h, x)
    direction, value = residual.rewrite_inputs(state, sublayer(h), h, value)
    return Pending(state, direction, value, gate, residual.eps_k, chain)


def _advance(pending: Pending, read: Read) -> _Reading:
    """Apply the pending write and read the new state, in its dtype."""
    *write, eps_k, chain = pending
    if read.compress == "identity":  # X' is its own read: the fused operator would store it twice
        state = functional.rewrite(*write, eps_k=eps_k)
        return _Reading(state, state.squeeze(-1), None)
    options: dict[str, Any] = {
        "eps_k": eps_k,
        "compress": read.effective_weight(),
        "norm_eps": None,
        "context_dtype": pending.state.dtype,
    }
    if chain is None:
        result = functional.rewrite_read(*write, **options)
    else:
        result, chain = functional.rewrite_read_chained(*write, chain=chain, **options)
    return _Reading(result.state, result.context, chain)


# --- the model ------------------------------------------------------------------------------------


def convert(
    model: GPT,
    *,
    value_channels: int = 1,
    compress: Compress | None = None,
    expand: ExpandKind = "repeat",
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

    A model that was trained with additions computes another function after conversion. It computes
    nearly the same one at first if eps_k and value_init are both set to a number E above the
    norms of the state and of the sublayers' outputs: then k̂ ≈ k/E and β k̂ (v − k̂ᵀX) ≈ k.

    Args:
        model: nanoGPT's GPT, or a model with the same `transformer` and blocks.
        value_channels, compress, expand: as in DeltaStream.
        disable: leave the model unchanged, so that one flag switches an A/B comparison. Wrong
            arguments still raise.
        options: further options of DeltaStream, including those of DeltaResidual. norm_eps, device
            and dtype are not allowed: the model sets them.

    Raises:
        TypeError: `model` lacks modules of nanoGPT's GPT or has others; an option is unknown.
        ValueError: `model` is already converted; DeltaStream refuses an option.
    """
    _check_model(model)
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
    for i, block in enumerate(blocks):
        blocks[i] = DeltaBlock(
            block,
            (stream.reads[2 * i], stream.reads[2 * i + 1]),
            (stream.residuals[2 * i], stream.residuals[2 * i + 1]),
            expand=stream.expand if i == 0 else None,
            readout=stream.readout if i == len(blocks) - 1 else None,
            anchor_every=stream.anchor_every,
            stream_dtype=stream.stream_dtype,
        )
    kind: Any = type(model)
    model.__class__ = _converted(kind)
    return model


class _Converted(nn.Module):
    """Mixin that `convert` puts before the class of a model."""

    def configure_optimizers(self, *args: Any, **kwargs: Any) -> Any:
        """Run nanoGPT's method on nanoGPT's parameters, then add the new ones without decay."""
        modules = [module for module in self.modules() if isinstance(module, NEVER_DECAYED)]
        new = {p: None for module in modules for p in module.parameters() if p.requires_grad}
        for parameter in new:
            parameter.requires_grad_(False)  # nanoGPT's method skips parameters without gradient
        try:
            optimizer = super().configure_optimizers(*args, **kwargs)  # type: ignore[misc]
        finally:
            for parameter in new:
                parameter.requires_grad_(True)
        optimizer.add_param_group({"params": list(new), "weight_decay": 0.0})
        return optimizer

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


def _check_has(name: str, module: nn.Module, children: tuple[str, ...]) -> None:
    for child in children:
        if child not in module._modules:
            raise TypeError(
                f"`{name}` must have a module `{child}`, as in nanoGPT's GPT before torch.compile "
                f"or DDP wraps it, got a {type(module).__name__} without it"
            )
