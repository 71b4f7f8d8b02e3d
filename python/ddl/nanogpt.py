"""nanoGPT's GPT on a delta stream: every residual addition becomes a rewrite.

    model = ddl.nanogpt.convert(model, value_channels=4)

Only the blocks change. Embeddings, attention, MLP, LayerNorms and head stay the modules they are,
under the names they have, and so does the model's `forward`, which hands each block what the block
before it returned. Between two blocks that is a `Pending` write instead of a tensor, so that the
next block's read is fused with it.
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
from ddl.nn.stream import DeltaStream
from ddl.optim import NEVER_DECAYED
from ddl.options import Compress, ExpandKind

__all__ = ["DeltaBlock", "Pending", "convert"]

GPT = TypeVar("GPT", bound=nn.Module)

BLOCK = ("ln_1", "attn", "ln_2", "mlp")  # all there is in nanoGPT's Block


class Pending(NamedTuple):
    """A state, and the write into it that is fused with the next read.

    state: X (B, T, d, m). direction: k (B, T, d). value: v (B, T, m). gate: β (B, T).
    """

    state: Tensor
    direction: Tensor
    value: Tensor
    gate: Tensor
    eps_k: float


class DeltaBlock(nn.Module):
    """nanoGPT's Block, rewriting where it added; `ln_1`, `attn`, `ln_2` and `mlp` are its own.

        h = ln_1(read_attn(X))
        X = res_attn(X, attn(h), context=h)
        h = ln_2(read_mlp(X))
        X = res_mlp(X, mlp(h), context=h)

    The operators read without a norm: the LayerNorm makes the context h of the raw read, and value
    and gate are computed from h. The first block expands the embeddings (B, T, d), the last one
    returns the readout (B, T, d), which ln_f normalises. As in DeltaStream, reads and residuals
    give their parameters to fused operators and are not called themselves.
    """

    def __init__(
        self,
        block: Any,
        reads: Sequence[Any],
        residuals: Sequence[Any],
        *,
        expand: Expand | None,
        readout: Read | None,
    ) -> None:
        super().__init__()
        self.ln_1, self.attn, self.ln_2, self.mlp = (getattr(block, name) for name in BLOCK)
        self.read_attn, self.read_mlp = reads
        self.res_attn, self.res_mlp = residuals
        self.expand, self.readout = expand, readout
        self.train(block.training)

    def forward(self, x: Tensor | Pending) -> Tensor | Pending:
        """Embeddings, or the write that the block before left → this block's, or the readout.

        Raises TypeError if a block other than the first gets a tensor, or a read or residual is
        wrapped.
        """
        read_attn = require_exact_type("read_attn", self.read_attn, Read)
        read_mlp = require_exact_type("read_mlp", self.read_mlp, Read)
        res_attn = require_exact_type("res_attn", self.res_attn, DeltaResidual)
        res_mlp = require_exact_type("res_mlp", self.res_mlp, DeltaResidual)
        state, x = self._open(x, read_attn) if isinstance(x, Tensor) else _advance(x, read_attn)
        state, x = _advance(_sublayer(state, x, self.ln_1, self.attn, res_attn), read_mlp)
        pending = _sublayer(state, x, self.ln_2, self.mlp, res_mlp)
        if self.readout is None:
            return pending
        return _advance(pending, require_exact_type("readout", self.readout, Read))[1]

    def _open(self, x: Tensor, read: Read) -> tuple[Tensor, Tensor]:
        """Embeddings → (X, x), the state that they open and its read."""
        if self.expand is None:
            raise TypeError("`x` must be what the block before returned, got a Tensor")
        state = self.expand(x)
        state = state.unsqueeze(-1) if read.value_channels == 1 else state
        if read.compress == "identity":
            return state, state.squeeze(-1)
        weight, dtype = read.effective_weight(), state.dtype
        result = functional.read(state, compress=weight, norm_eps=None, context_dtype=dtype)
        return state, result.context


def _sublayer(
    state: Tensor, x: Tensor, norm: nn.Module, sublayer: nn.Module, residual: DeltaResidual
) -> Pending:
    """The sublayer's write into X (B, T, d, m), given the read x (B, T, d)."""
    h = norm(x)
    value, gate = residual.value_and_gate(state, h, x)
    direction, value = residual.rewrite_inputs(state, sublayer(h), h, value)
    return Pending(state, direction, value, gate, residual.eps_k)


def _advance(pending: Pending, read: Read) -> tuple[Tensor, Tensor]:
    """(X', x): the state with the pending write, and its read, raw and in the state's dtype."""
    *write, eps_k = pending
    if read.compress == "identity":  # X' is its own read: a fused one would store it twice
        state = functional.rewrite(*write, eps_k=eps_k)
        return state, state.squeeze(-1)
    weight, dtype = read.effective_weight(), pending.state.dtype
    result = functional.rewrite_read(
        *write, eps_k=eps_k, compress=weight, norm_eps=None, context_dtype=dtype
    )
    return result.state, result.context


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
    """Turns every residual addition of nanoGPT's GPT into a rewrite; changes and returns `model`.

    Call it before `load_state_dict` of a converted checkpoint, before `configure_optimizers` and
    before torch.compile or DDP wraps the model.

    Every entry of the state dict keeps its name and its numbers. New in `transformer.h.N` are gates
    and values, `res_attn` and `res_mlp`, compressions, `read_attn` and `read_mlp`, and where they
    have parameters `expand` in the first block and `readout` in the last. They start as in
    DeltaStream, and torch's random state stays as it was: the converted model and the original see
    the same batches and dropout masks. `configure_optimizers` puts the new parameters into a third
    group, without decay.

    A model that was trained with additions computes something else after conversion. With eps_k and
    value_init both set to a number E above the norms of the state and of what sublayers return,
    it starts as nearly the same function: k̂ is then k/E and β k̂ (v − k̂ᵀX) nearly k.

    Args:
        model: nanoGPT's GPT, or one with the `transformer` and the blocks that it has.
        value_channels, compress, expand: as in DeltaStream.
        disable: leave the model exactly as it is, for an A/B by one flag; what is wrong with the
            other arguments raises nevertheless.
        options: further options of DeltaStream, but for norm_eps, device and dtype, which the model
            has; those of DeltaResidual among them.

    Raises:
        TypeError: a `model` without the modules of nanoGPT's or with others, an unknown option.
        ValueError: a `model` that is converted already, an option that DeltaStream refuses.
    """
    _check_model(model)
    for name in ("norm_eps", "device", "dtype"):
        if name in options:
            raise TypeError(f"`{name}` must be left to the model, got {options[name]!r}")
    transformer: Any = model.transformer
    weight, blocks = transformer.wte.weight, transformer.h
    with torch.random.fork_rng(devices=[]):  # drawn on the CPU, wherever the model is
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
        )
    kind: Any = type(model)
    model.__class__ = _converted(kind)
    return model


class _Converted(nn.Module):
    """Mixin that `convert` puts before the class of a model."""

    def configure_optimizers(self, *args: Any, **kwargs: Any) -> Any:
        """nanoGPT's own, over nanoGPT's own parameters; the new ones join it without decay."""
        modules = [module for module in self.modules() if isinstance(module, NEVER_DECAYED)]
        new = {p: None for module in modules for p in module.parameters() if p.requires_grad}
        for parameter in new:
            parameter.requires_grad_(False)  # nanoGPT leaves out parameters that need none
        try:
            optimizer = super().configure_optimizers(*args, **kwargs)  # type: ignore[misc]
        finally:
            for parameter in new:
                parameter.requires_grad_(True)
        optimizer.add_param_group({"params": list(new), "weight_decay": 0.0})
        return optimizer

    def __reduce__(self) -> Any:
        """For pickle, which cannot find a class made at run time."""
        return _blank, (type(self).__bases__[1],), self.__dict__


@cache
def _converted(kind: Any) -> Any:
    return type(f"Delta{kind.__name__}", (_Converted, kind), {"__doc__": kind.__doc__})


def _blank(kind: Any) -> Any:
    converted = _converted(kind)
    return converted.__new__(converted)


def _check_model(model: Any) -> None:
    """Raises unless `model` is built like nanoGPT's GPT and is not converted yet."""
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
