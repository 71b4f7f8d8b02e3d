"""nanoGPT's block with rewrites, and the write that passes between two blocks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor, nn

from ddl import functional
from ddl.nn.checks import require_exact_type
from ddl.nn.expand import Expand
from ddl.nn.read import Read
from ddl.nn.residual import DeltaResidual
from ddl.nn.trunk import as_stream, boundary, first_chain, opened
from ddl.ops.checks import gate_dtype
from ddl.options import StreamDtype
from ddl.results import Chain, Write

from .annealing import Annealing, blend

BLOCK = ("ln_1", "attn", "ln_2", "mlp")  # every module in nanoGPT's Block


class DeferredRewrite(NamedTuple):
    """A state and a rewrite of it that has not been applied yet: it is fused with the next read.

    state: X (B, T, d, m). write: its direction k (B, T, d), value v (B, T, m) and gate β (B, T).
    chain: the rewrites since the last state that is stored; None in inference and while the model
    is annealed. share: the rewrites' share a, a tensor (), while the model is annealed, else None.
    It is already in this write: the next block needs it for its own.
    """

    state: Tensor
    write: Write
    chain: Chain | None
    share: Tensor | None


class DeltaBlock(nn.Module):
    """nanoGPT's Block with a rewrite in place of each addition; it keeps ln_1, attn, ln_2 and mlp.

        h = ln_1(read_attn(X))
        X = res_attn(X, attn(h), context=h)
        h = ln_2(read_mlp(X))
        X = res_mlp(X, mlp(h), context=h)

    The fused reads skip their norm: nanoGPT's LayerNorm turns the raw read into the context h, and
    value and gate are computed from h. The first block expands the embeddings (B, T, d); the last
    one returns the final read (B, T, d), which ln_f normalises. As in DeltaStream, the fused
    operators read the parameters of reads and residuals directly and never call their `forward`. If
    the model starts with additions, the first block's `anneal` says how much of each write still is
    one. anchor_every, stream_dtype: as in DeltaStream. sublayers: of all blocks.
    """

    def __init__(
        self,
        block: Any,
        reads: Sequence[Any],
        residuals: Sequence[Any],
        *,
        expand: Expand | None,
        anneal: Annealing | None,
        readout: Read | None,
        anchor_every: int | None,
        sublayers: int,
        stream_dtype: StreamDtype | None,
    ) -> None:
        super().__init__()
        self.ln_1, self.attn, self.ln_2, self.mlp = (getattr(block, name) for name in BLOCK)
        self.read_attn, self.read_mlp = reads
        self.res_attn, self.res_mlp = residuals
        self.expand, self.anneal, self.readout = expand, anneal, readout
        self.anchor_every, self.sublayers = anchor_every, sublayers
        self.stream_dtype = stream_dtype
        self.train(block.training)

    def forward(self, x: Tensor | DeferredRewrite) -> Tensor | DeferredRewrite:
        """Run one block: embeddings or a deferred rewrite in, another or the final read out.

        x: (B, T, d) for the first block, the previous block's `DeferredRewrite` for the others.
        Returns the final read (B, T, d) from the last block, a `DeferredRewrite` from the others.
        Raises TypeError if a block other than the first gets a tensor, or a read or residual is
        wrapped.
        """
        read_attn = require_exact_type("read_attn", self.read_attn, Read)
        read_mlp = require_exact_type("read_mlp", self.read_mlp, Read)
        res_attn = require_exact_type("res_attn", self.res_attn, DeltaResidual)
        res_mlp = require_exact_type("res_mlp", self.res_mlp, DeltaResidual)
        reading = self._open(x, read_attn) if isinstance(x, Tensor) else _advance(x, read_attn)
        reading = _advance(_sublayer(reading, self.ln_1, self.attn, res_attn), read_mlp)
        deferred = _sublayer(reading, self.ln_2, self.mlp, res_mlp)
        if self.readout is None:
            return deferred
        return _advance(deferred, require_exact_type("readout", self.readout, Read)).x

    def _open(self, x: Tensor, read: Read) -> _Reading:
        """Expand embeddings (B, T, d) to the first state and read it."""
        if self.expand is None:
            raise TypeError("`x` must be what the block before returned, got a Tensor")
        state = opened(self.expand, as_stream(x, self.stream_dtype))
        share = None
        if self.anneal is not None and not self.anneal.done:
            share = self.anneal.share(gate_dtype(state))
        if read.compress == "identity":
            return _Reading(state, state.squeeze(-1), None, share)
        x = boundary(state, None, read.raw(state))[0].context
        chain = None
        if share is None:  # a chain cannot compute a state again that an addition changed
            chain = first_chain(state, self.anchor_every, self.sublayers)
        return _Reading(state, x, chain, share)


class _Reading(NamedTuple):
    """A state X (B, T, d, m), its raw read x (B, T, d), the rewrites that led to X, and a."""

    state: Tensor
    x: Tensor
    chain: Chain | None
    share: Tensor | None


def _sublayer(
    reading: _Reading, norm: nn.Module, sublayer: nn.Module, residual: DeltaResidual
) -> DeferredRewrite:
    """Run the sublayer on norm(x); return its rewrite of X, deferred."""
    state, x, chain, share = reading
    h = norm(x)
    value, gate = residual.value_and_gate(h, x)
    written = sublayer(h)
    write = residual.write(state, written, h, value, gate)
    if share is not None:
        state, write = blend(share, state, written, write)
    return DeferredRewrite(state, residual.hooked(state, write), chain, share)


def _advance(deferred: DeferredRewrite, read: Read) -> _Reading:
    """Apply the deferred rewrite and read the new state, in its dtype."""
    state, write, chain, share = deferred
    if read.compress == "identity":  # X' is its own read: the fused operator would store it twice
        state = functional.write_to(state, write)
        return _Reading(state, state.squeeze(-1), None, share)
    result, chain = boundary(state, write, read.raw(state), chain=chain)
    return _Reading(result.state, result.context, chain, share)
