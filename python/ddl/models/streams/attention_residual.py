"""Attention residuals: each sublayer attends over what earlier ones wrote.

    v₀ = embedding,  v_i = Σ F_l, the sum of the outputs of a block of sublayers
    x = Σ_i α_i v_i,  α = softmax_i(q · rms(v_i))
    v_now ← v_now + F(norm(x))

Each read has a q (d,) of its own; the first one, of v₀ alone, needs none. They start as 0, so that
a new model reads the mean of the v_i, which its norm makes the additive stream. A block ends after
so many sublayers; until then its sum so far is attended to. A weight of rms would only be a factor
of q.

Source: Kimi Team, "Attention Residuals", arXiv 2603.15031 (block attention residuals; with one
sublayer per block, full ones).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from ddl.nn.additions import AddingStream, Addition
from ddl.nn.checks import require_own_forward

from ..sublayers import wide


class AttentionResidualStream(AddingStream):
    """A sum per block of sublayers, and attention over them before each sublayer.

    sublayers_per_block: number of consecutive sublayers whose outputs are summed.
    """

    def __init__(
        self,
        hidden_size: int,
        sublayers: Iterable[nn.Module],
        *,
        sublayers_per_block: int,
        norm_eps: float,
    ) -> None:
        super().__init__(sublayers)
        self.sublayers_per_block, self.norm_eps = sublayers_per_block, norm_eps
        self.norms = nn.ModuleList(nn.RMSNorm(hidden_size, norm_eps) for _ in self.sublayers)
        # Of the read after each sublayer.
        self.queries = nn.ParameterList(torch.empty(hidden_size) for _ in self.sublayers)
        self.readout = nn.RMSNorm(hidden_size, norm_eps)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        super().reset_parameters()
        for query in self.queries:
            nn.init.zeros_(query)

    def forward(self, x: Tensor, *args: Any, keep: Tensor | None = None, **_: Any) -> Tensor:
        """Map embeddings x (B, T, d) to the final read (B, T, d); as AdditiveStream."""
        sums, read = [x], x
        queries = require_own_forward("queries", self.queries, nn.ParameterList)
        parts = zip(self.norms, self.sublayers, queries, strict=True)
        for i, (norm, sublayer, query) in enumerate(parts):
            written = sublayer(norm(read), *args)
            if self.hooks:
                self.show(self._addition(i, sums, written, keep))
            if i % self.sublayers_per_block == 0:
                sums.append(written.to(x.dtype))
            else:
                sums[-1] = sums[-1] + written
            read = attend(sums, query, self.norm_eps)
        return self.readout(read)

    def read_out(self, state: Tensor) -> Tensor:
        """Map the sums (B, T, d, n) of all blocks, the embedding's first, to the final read."""
        sums = list(state.unbind(-1))
        h: Tensor = self.readout(attend(sums, self.queries[-1], self.norm_eps))
        return h

    def _addition(
        self, index: int, sums: list[Tensor], written: Tensor, keep: Tensor | None
    ) -> Addition:
        """A sublayer's addition to its block: of all sums those to come are still 0."""
        blocks = 1 + -(-len(self.sublayers) // self.sublayers_per_block)
        missing = [torch.zeros_like(sums[0])] * (blocks - len(sums))
        block = torch.tensor(1 + index // self.sublayers_per_block, device=written.device)
        join = nn.functional.one_hot(block, blocks).to(written.dtype)
        join = join.expand(*written.shape[:-1], blocks)
        return Addition(index, torch.stack([*sums, *missing], -1), written, None, join, keep)


def attend(sums: list[Tensor], query: Tensor, eps: float) -> Tensor:
    """Σ_i softmax_i(q · rms(v_i)) v_i over v_i (B, T, d) → (B, T, d)."""
    logits = [
        (v * wide(query)).sum(-1) * torch.rsqrt(v.square().mean(-1) + eps) for v in map(wide, sums)
    ]
    weights = torch.softmax(torch.stack(logits), 0).to(sums[0].dtype).unsqueeze(-1)
    x = weights[0] * sums[0]
    for weight, v in zip(weights[1:], sums[1:], strict=True):
        x = x + weight * v
    return x
