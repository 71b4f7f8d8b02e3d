"""Additions: x ← x + F(norm(x)), and a norm at the end."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn

from ddl.nn.additions import AddingStream, Addition


class AdditiveStream(AddingStream):
    """The plain residual stream, x = x + s F(norm(x)), with a final norm: the baseline trunk.

    branch_scale: s.
    """

    def __init__(
        self,
        hidden_size: int,
        sublayers: Iterable[nn.Module],
        *,
        norm_eps: float,
        branch_scale: float = 1.0,
    ) -> None:
        super().__init__(sublayers)
        self.branch_scale = branch_scale
        self.norms = nn.ModuleList(nn.RMSNorm(hidden_size, norm_eps) for _ in self.sublayers)
        self.readout = nn.RMSNorm(hidden_size, norm_eps)

    def forward(self, x: Tensor, *args: Any, keep: Tensor | None = None, **_: Any) -> Tensor:
        """Map embeddings x (B, T, d) to the final read (B, T, d); `args` go to every sublayer.

        Hooks alone see `keep`; the other arguments of DeltaStream have no effect on a stream that
        convolves nothing over time.
        """
        for i, (norm, sublayer) in enumerate(zip(self.norms, self.sublayers, strict=True)):
            written = sublayer(norm(x), *args)
            if self.branch_scale != 1:
                written = self.branch_scale * written
            if self.hooks:
                self.show(Addition(i, x.unsqueeze(-1), written, None, None, keep))
            x = x + written
        return self.readout(x)

    def read_out(self, state: Tensor) -> Tensor:
        """Map a state (B, T, d, 1) to the final read (B, T, d)."""
        return self.readout(state.squeeze(-1))
