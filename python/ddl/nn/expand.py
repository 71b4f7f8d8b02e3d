"""Expand: embeddings to an expanded residual stream."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ddl import functional
from ddl.options import STREAM_OPTIONS, ExpandKind, check_count, check_options

from .checks import check_stream
from .linear import empty_parameter, reset_taps_, shown

OPTIONS = {
    "kind": STREAM_OPTIONS["expand"],
    "kernel_size": STREAM_OPTIONS["expand_kernel_size"]._replace(used=[{"kind": "conv"}]),
}


class Expand(nn.Module):
    """Expand embeddings x (…, T, d) to a state X (…, T, d, m); with m = 1 it is (…, T, d).

    Args:
        hidden_size: d.
        value_channels: m.
        kind: "repeat", x in every value channel; "conv", a causal depthwise convolution over time,
            X_t,ij = Σ_s w_ijs x_{t−s,i}, s < K, initialised as repetition (tap 0 is 1, the others
            are 0).
        kernel_size: K, the tokens that "conv" spans.
        device, dtype: of the parameters.

    Raises:
        ValueError: an option is unknown, out of range, or without effect and not at its default.

    Source: DDL (arXiv 2601.00417, newest version), embedding convolution (EC).
    """

    def __init__(
        self,
        hidden_size: int,
        value_channels: int = 1,
        *,
        kind: ExpandKind = "repeat",
        kernel_size: int = 4,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_count("hidden_size", hidden_size)
        check_count("value_channels", value_channels)
        check_options(locals(), OPTIONS)
        self.hidden_size, self.value_channels = hidden_size, value_channels
        self.kind, self.kernel_size = kind, kernel_size
        self.weight = None
        if kind == "conv":
            size = (hidden_size, value_channels, kernel_size)
            self.weight = empty_parameter(*size, device=device, dtype=dtype)
        self.reset_parameters()

    never_decayed = nn.Module.parameters  # zero is not a neutral value for a tap
    extra_repr = shown

    def reset_parameters(self) -> None:
        """Reset the convolution to repetition: every value channel is x."""
        if self.weight is not None:
            reset_taps_(self.weight)

    def forward(self, x: Tensor, *, document_starts: Tensor | None = None) -> Tensor:
        """Map x (…, T, d) to X (…, T, d, m), or (…, T, d) if m = 1, in the dtype of x.

        document_starts: (…, T) bool, the tokens with which a document starts; the convolution does
            not look beyond the start of its own. None for one document per sequence.

        Raises ValueError for another shape, TypeError for an unsupported dtype.
        """
        over_time, starts = self.weight is not None, document_starts
        check_stream("x", x, (self.hidden_size,), over_time=over_time, document_starts=starts)
        if self.weight is None and self.value_channels == 1:
            return x
        state = functional.expand(
            x,
            self.weight,
            value_channels=self.value_channels,
            document_starts=None if self.weight is None else document_starts,
        )
        return state.squeeze(-1) if self.value_channels == 1 else state
