"""DeltaStream: an expanded residual stream through a whole trunk."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, get_args

import torch
from torch import Tensor, nn

from . import functional
from ._checks import check_choice, check_count, check_returned, check_stream
from .read import Compress, Expand, ExpandKind, Parameterization, Read
from .residual import DeltaResidual

__all__ = ["DeltaStream", "Expand", "Read"]


class DeltaStream(nn.Module):
    """A whole trunk on an expanded residual stream: expand, read – sublayer – rewrite, readout.

    h = stream(x): x (B, T, d), the embeddings → h (B, T, d), the normalised readout. Every sublayer
    F maps a context (B, T, d) to (B, T, d), without norm or residual of its own; further arguments
    of `forward` go to each of them. Each rewrite is fused with the read after it, so that the state
    moves once through memory between two sublayers. It computes what this loop computes, from the
    same parameters:

        X = stream.expand(x)
        for read, sublayer, residual in zip(stream.reads, stream.sublayers, stream.residuals):
            h = read(X)
            X = residual(X, sublayer(h), context=h)
        h = stream.readout(X)

    (With value_from="compressed" the loop passes the raw read on: `h, x = read(X,
    return_compressed=True)` and `residual(…, compressed=x)`.)

    Args:
        hidden_size: d.
        sublayers: the F's in order, attention and MLP in turn for a Transformer.
        value_channels: m.
        compress, kernel_size, parameterization, causal, norm_eps: as in Read. compress=None is
            "identity" for one value channel and "channel" for more.
        expand, expand_kernel_size: kind and kernel_size of Expand.
        sublayers_per_compressor: consecutive sublayers that share one compression (the papers share
            it in a block of attention and MLP: 2).
        residual: further keyword arguments of DeltaResidual.

    Raises:
        ValueError: an option that is unknown or does not fit.

    Source: DDL (arXiv 2601.00417, newest version), variants CC and TC with and without EC.
    """

    def __init__(
        self,
        hidden_size: int,
        sublayers: Sequence[nn.Module],
        *,
        value_channels: int = 1,
        compress: Compress | None = None,
        kernel_size: int = 4,
        parameterization: Parameterization = "direct",
        causal: bool = False,
        norm_eps: float = 1e-5,
        expand: ExpandKind = "repeat",
        expand_kernel_size: int = 4,
        sublayers_per_compressor: int = 2,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **residual: Any,
    ) -> None:
        super().__init__()
        check_count("sublayers_per_compressor", sublayers_per_compressor)
        check_choice("expand", expand, get_args(ExpandKind))
        check_count("expand_kernel_size", expand_kernel_size)
        sublayers = list(sublayers)
        if len(sublayers) == 0:
            raise ValueError("`sublayers` must hold at least one module, got none")
        self.sublayers = nn.ModuleList(sublayers)
        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        self.expand = Expand(
            hidden_size, value_channels, kind=expand, kernel_size=expand_kernel_size, **factory
        )

        options: dict[str, Any] = {
            "compress": compress or ("identity" if value_channels == 1 else "channel"),
            "kernel_size": kernel_size,
            "parameterization": parameterization,
            "causal": causal,
            "norm_eps": norm_eps,
            **factory,
        }
        reads: list[Read] = []
        for index in range(len(sublayers)):
            first = index % sublayers_per_compressor
            shared = reads[index - first] if first else None
            reads.append(Read(hidden_size, value_channels, shared=shared, **options))
        self.reads = nn.ModuleList(reads)
        self.residuals = nn.ModuleList(
            DeltaResidual(hidden_size, value_channels, **residual, **factory) for _ in sublayers
        )
        self.readout = Read(hidden_size, value_channels, **options)

    def reset_parameters(self) -> None:
        """Resets expansion, reads, residuals and readout; the sublayers are the caller's."""
        for module in (self.expand, *self.reads, *self.residuals, self.readout):
            module.reset_parameters()

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """x (B, T, d) → the normalised readout (B, T, d); the rest goes to every sublayer.

        Raises ValueError where x or what a sublayer returns has another shape, TypeError where it
        is no tensor, or of a dtype that the operators do not know.
        """
        check_stream("x", x, (self.expand.hidden_size,), over_time=True)
        state = self.expand(x)
        state = state.unsqueeze(-1) if self.expand.value_channels == 1 else state
        arguments = self._read_arguments()
        context, value, gate = functional.read(state, **arguments[0])
        for index, (sublayer, residual, after) in enumerate(
            zip(self.sublayers, self.residuals, arguments[1:], strict=True)
        ):
            written = sublayer(context, *args, **kwargs)
            check_returned(f"sublayers[{index}]", written, context)
            assert isinstance(residual, DeltaResidual)
            value, gate = residual.complete(context, value, gate)
            direction, value = residual.write(written, context, value)
            state, context, value, gate = functional.rewrite_read(
                state, direction, value, gate, eps_k=residual.eps_k, **after
            )
        return context

    def _read_arguments(self) -> list[dict[str, Any]]:
        """Arguments of every read, the last one the readout's; a shared weight is formed once."""
        weights: dict[int, Tensor | None] = {}
        arguments = []
        residuals = (*self.residuals, None)
        for read, residual in zip((*self.reads, self.readout), residuals, strict=True):
            owner = read._shared[0] if read._shared else read
            if id(owner) not in weights:
                weights[id(owner)] = owner.effective_weight()
            arguments.append(
                {
                    "compress": weights[id(owner)],
                    "norm_weight": read.norm_weight,
                    "norm_eps": read.norm_eps,
                    **(residual.fused() if residual is not None else {}),
                }
            )
        return arguments
