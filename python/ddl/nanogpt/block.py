"""nanoGPT's block with rewrites, and the write that passes between two blocks."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor, nn

from ddl import functional
from ddl.nn.checks import require_exact_type
from ddl.nn.read import Read
from ddl.nn.residual import DeltaResidual
from ddl.nn.stream import DeltaStream
from ddl.nn.trunk import as_stream, boundary, first_chain, opened
from ddl.ops.checks import gate_dtype
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
    one.
    """

    def __init__(
        self, block: Any, number: int, stream: DeltaStream, anneal: Annealing | None
    ) -> None:
        super().__init__()
        self.ln_1, self.attn, self.ln_2, self.mlp = (getattr(block, name) for name in BLOCK)
        two, self.sublayers = slice(2 * number, 2 * number + 2), len(stream.sublayers)
        self.read_attn, self.read_mlp = stream.reads[two]
        self.res_attn, self.res_mlp = stream.residuals[two]
        self.expand = stream.expand if number == 0 else None
        self.anneal = anneal if number == 0 else None
        self.readout = stream.readout if two.stop == self.sublayers else None
        self.anchor_every, self.stream_dtype = stream.anchor_every, stream.stream_dtype
        self.train(block.training)

    def forward(self, x: Tensor | DeferredRewrite) -> Tensor | DeferredRewrite:
        """Run one block: embeddings or a deferred rewrite in, another or the final read out.

        x: (B, T, d) for the first block, the previous block's `DeferredRewrite` for the others.
        Returns the final read (B, T, d) from the last block, a `DeferredRewrite` from the others.
        Raises TypeError if a block other than the first gets a tensor, or a read or residual is
        wrapped.
        """
        write: Any = None  # before the first sublayer
        state, write, chain, share = self._opened(x) if isinstance(x, Tensor) else x
        for name, norm in (("attn", self.ln_1), ("mlp", self.ln_2)):
            residual = require_exact_type(
                f"res_{name}", getattr(self, f"res_{name}"), DeltaResidual
            )
            state, raw, chain = self._read(f"read_{name}", state, write, chain)
            h = norm(raw)
            value, gate = residual.value_and_gate(h, raw)
            written = getattr(self, name)(h)
            write = residual.write(state, written, h, value, gate)
            if share is not None:
                state, write = blend(share, state, written, write)
            write = residual.hooked(state, write)
        if self.readout is None:
            return DeferredRewrite(state, write, chain, share)
        return self._read("readout", state, write, chain)[1]

    def _opened(self, x: Tensor) -> tuple[Tensor, None, Chain | None, Tensor | None]:
        """The first state of embeddings (B, T, d), as the parts of a DeferredRewrite."""
        if self.expand is None:
            raise TypeError("`x` must be what the block before returned, got a Tensor")
        state = opened(self.expand, as_stream(x, self.stream_dtype))
        if self.anneal is not None and not self.anneal.done:
            # A chain cannot compute a state again that an addition changed.
            return state, None, None, self.anneal.share(gate_dtype(state))
        return state, None, first_chain(state, self.anchor_every, self.sublayers), None

    def _read(
        self, name: str, state: Tensor, write: Write | None, chain: Chain | None
    ) -> tuple[Tensor, Tensor, Chain | None]:
        """Rewrite a state, if there is a write, and read it: X, x (B, T, d), and the chain to X."""
        read = require_exact_type(name, getattr(self, name), Read)
        if read.compress == "identity":  # X is its own read, which the operator would store twice
            state = state if write is None else functional.write_to(state, write)
            return state, state.squeeze(-1), None
        result, chain = boundary(state, write, read.raw(state), chain=chain)
        return result.state, result.context, chain
