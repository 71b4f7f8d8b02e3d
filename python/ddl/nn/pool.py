"""Pool: reduce a token's state to one vector, for gates and directions computed from the state."""

from __future__ import annotations

from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ddl import functional
from ddl.ops.checks import gate_dtype

from .convolution import Slot, convolve

__all__ = ["Pool"]

NORM_EPS = 1e-5


class Pool(nn.Module):
    """Reduce X (…, d, m) to z (…, width) with root mean square 1, in float32 (float64 for float64).

    mean: z = x̄/rms(x̄) with x̄ the mean over the value channels. flatten: all d·m numbers, divided by
    their RMS. convolved: the means convolved over time, x̃_t,i = Σ_s w_is x̄_{t−s,i}, s < K, zeros
    before t = 0, divided by their RMS.

    z is normalised because the state grows from layer to layer, and one initialisation and one
    learning rate should fit all layers. It has no learned scale, because a matrix follows.
    Normalisation comes after the convolution, as in `Read`, so that the taps weigh the tokens as
    they are in the stream. Pooling costs another pass over the state, beside the fused read.

    Args:
        hidden_size, value_channels: d, m.
        kind: "mean", "flatten" or "convolved".
        kernel_size: K of "convolved".
        device, dtype: of the parameters.
    """

    def __init__(
        self,
        hidden_size: int,
        value_channels: int,
        kind: Literal["mean", "flatten", "convolved"],
        *,
        kernel_size: int = 4,
        **factory: Any,
    ) -> None:
        super().__init__()
        self.hidden_size, self.value_channels = hidden_size, value_channels
        self.kind, self.kernel_size = kind, kernel_size
        self.weight = None
        if kind == "convolved":
            self.weight = nn.Parameter(torch.empty(hidden_size, kernel_size, **factory))
        self.reset_parameters()

    @property
    def width(self) -> int:
        """Number of features in z."""
        return self.hidden_size * (self.value_channels if self.kind == "flatten" else 1)

    def reset_parameters(self) -> None:
        """Reset the convolution to the identity: tap 0 is 1, the others are 0."""
        if self.weight is not None:
            with torch.no_grad():
                self.weight.zero_()
                self.weight[:, 0].fill_(1)

    def forward(
        self, state: Tensor, slot: Slot | None = None, document_starts: Tensor | None = None
    ) -> Tensor:
        """Map X (…, d, m) to z (…, width).

        slot: of a convolution that goes on; None means that zeros come before. document_starts: as
        in `Read`.
        """
        if self.kind == "flatten":
            flat = state.flatten(-2).to(gate_dtype(state))
            return F.rms_norm(flat, flat.shape[-1:], eps=NORM_EPS)
        if self.weight is None:
            return self._mean(state, norm_eps=NORM_EPS)
        mean = self._mean(state, norm_eps=None)
        return convolve(mean, self.weight, slot, document_starts, norm_eps=NORM_EPS)

    def _mean(self, state: Tensor, norm_eps: float | None) -> Tensor:
        """Return x̄, or z with `norm_eps`, by a read with fixed weights 1/m."""
        dtype, m = gate_dtype(state), self.value_channels
        size = (self.hidden_size, m)
        mean = None if m == 1 else torch.full(size, 1 / m, dtype=dtype, device=state.device)
        return functional.read(state, compress=mean, norm_eps=norm_eps, context_dtype=dtype).context

    def extra_repr(self) -> str:
        taps = f", kernel_size={self.kernel_size}" if self.kind == "convolved" else ""
        return f"{self.hidden_size} × {self.value_channels} → {self.width}, {self.kind!r}{taps}"
