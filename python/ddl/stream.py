"""Read, Expand and DeltaStream: an expanded residual stream through a whole trunk."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from . import functional
from ._checks import check_choice, check_count, check_positive
from .residual import DeltaResidual

__all__ = ["DeltaStream", "Expand", "Read"]

Compress = Literal["identity", "channel", "token"]
Parameterization = Literal["direct", "factored"]
ExpandKind = Literal["repeat", "conv"]


class Read(nn.Module):
    """Compress the state to d features and normalise them: X (…, d, m) → h (…, d).

    compress: "identity" (m = 1, x = X), "channel" (x_i = Σ_j w_ij X_ij) or "token" (causal over time,
    x_t,i = Σ_s Σ_j w_ijs X_{t−s,ij}, s < kernel_size). Then h = RMSNorm(x)·γ. With one value channel the
    state is (…, d).

    parameterization: "direct", w itself is the parameter, (d, m) or (d, m, K); "factored", as in the
    papers' code, w is a convolution kernel followed by a read vector r (m,):
    token w_ijs = r_j c_ijs with c (d, m, K); channel w = c ∗ r with c (d, K) a same-padded correlation over
    the value axis, centred or causal. Both start as the mean over the value channels.

    shared: another Read whose compression this one uses (its parameters stay with their owner); only
    the norm is this one's own.

    Source: DDL (arXiv 2601.00417, newest version), channel and token compression.
    """

    def __init__(
        self,
        hidden_size: int,
        value_channels: int = 1,
        *,
        compress: Compress = "identity",
        kernel_size: int = 4,
        parameterization: Parameterization = "direct",
        causal: bool = False,
        norm_eps: float = 1e-5,
        shared: Read | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_count("hidden_size", hidden_size)
        check_count("value_channels", value_channels)
        check_count("kernel_size", kernel_size)
        check_choice("compress", compress, get_args(Compress))
        check_choice("parameterization", parameterization, get_args(Parameterization))
        check_positive("norm_eps", norm_eps)
        if compress == "identity" and value_channels != 1:
            raise ValueError(
                f'`compress` must be "channel" or "token" for {value_channels} value channels, '
                'got "identity"'
            )
        self.hidden_size, self.value_channels = hidden_size, value_channels
        self.compress, self.kernel_size = compress, kernel_size
        self.parameterization, self.causal, self.norm_eps = parameterization, causal, norm_eps
        self._shared = () if shared is None else (shared,)  # in a tuple: not a submodule of this one
        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        self.norm_weight = nn.Parameter(torch.empty(hidden_size, **factory))
        self.compress_weight = self.compress_kernel = self.compress_read = None
        if shared is None and compress != "identity":
            taps = (kernel_size,) if compress == "token" else ()
            if parameterization == "direct":
                self.compress_weight = _parameter(hidden_size, value_channels, *taps, **factory)
            else:
                kernel = (value_channels, *taps) if compress == "token" else (kernel_size,)
                self.compress_kernel = _parameter(hidden_size, *kernel, **factory)
                self.compress_read = _parameter(value_channels, **factory)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """γ = 1; the compression is the mean over the value channels of the current token."""
        nn.init.ones_(self.norm_weight)
        mean = 1 / self.value_channels
        with torch.no_grad():
            if self.compress_weight is not None:
                self.compress_weight.zero_()
                now = self.compress_weight[..., 0] if self.compress == "token" else self.compress_weight
                now.fill_(mean)
            if self.compress_kernel is not None and self.compress_read is not None:
                self.compress_kernel.zero_()
                self.compress_kernel[..., 0 if self.compress == "token" else self._centre].fill_(1)
                self.compress_read.fill_(mean)

    @property
    def _centre(self) -> int:
        """The tap of a same-padded correlation that reads its own position."""
        return self.kernel_size - 1 if self.causal else (self.kernel_size - 1) // 2

    def effective_weight(self) -> Tensor | None:
        """w: (d, m) for channel, (d, m, K) for token compression, None for the identity."""
        if self._shared:
            return self._shared[0].effective_weight()
        if self.compress_kernel is None or self.compress_read is None:
            return self.compress_weight
        if self.compress == "token":
            return self.compress_kernel * self.compress_read[:, None]
        # w_ij = Σ_s c_is r_{j−s+centre}: the correlation, then r, as one (K, m) matrix of shifted r.
        m, taps, centre = self.value_channels, self.kernel_size, self._centre
        padded = F.pad(self.compress_read, (taps, taps))
        shifted = torch.stack([padded[taps + centre - s :][:m] for s in range(taps)])
        return self.compress_kernel @ shifted

    def arguments(self) -> dict[str, Any]:
        """This read as arguments of `ddl.functional.read`."""
        return {
            "compress": self.effective_weight(),
            "norm_weight": self.norm_weight,
            "norm_eps": self.norm_eps,
        }

    def forward(self, state: Tensor, *, return_compressed: bool = False) -> Any:
        """X → h, or (h, x) with the raw read where `return_compressed` is set."""
        state = state.unsqueeze(-1) if self.value_channels == 1 else state
        if not return_compressed:
            return functional.read(state, **self.arguments()).context
        weight = self.effective_weight()
        x = functional.read(
            state, compress=weight, norm_eps=None, context_dtype=state.dtype
        ).context
        h = functional.read(
            x.unsqueeze(-1), norm_weight=self.norm_weight, norm_eps=self.norm_eps
        ).context
        return h, x

    def extra_repr(self) -> str:
        kernel = f", kernel_size={self.kernel_size}" if self.compress == "token" else ""
        shared = ", shared" if self._shared else ""
        return (
            f"hidden_size={self.hidden_size}, value_channels={self.value_channels}, "
            f"compress={self.compress!r}{kernel}, parameterization={self.parameterization!r}{shared}"
        )


class Expand(nn.Module):
    """Open the stream: x (…, T, d) → X (…, T, d, m); (…, T, d) again with one value channel.

    kind: "repeat", x in every value channel; "conv", a depthwise causal convolution over time,
    X_t,ij = Σ_s w_ijs x_{t−s,i}, that starts as repetition (tap 0 is 1, the others 0).

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
        check_count("kernel_size", kernel_size)
        check_choice("kind", kind, get_args(ExpandKind))
        self.hidden_size, self.value_channels = hidden_size, value_channels
        self.kind, self.kernel_size = kind, kernel_size
        self.weight = None
        if kind == "conv":
            size = (hidden_size, value_channels, kernel_size)
            self.weight = _parameter(*size, device=device, dtype=dtype)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """The identity: every value channel starts as x."""
        if self.weight is not None:
            with torch.no_grad():
                self.weight.zero_()
                self.weight[..., 0].fill_(1)

    def forward(self, x: Tensor) -> Tensor:
        """x (…, T, d) → X (…, T, d, m)."""
        if self.weight is None and self.value_channels == 1:
            return x
        state = functional.expand(x, self.weight, value_channels=self.value_channels)
        return state.squeeze(-1) if self.value_channels == 1 else state

    def extra_repr(self) -> str:
        kernel = f", kernel_size={self.kernel_size}" if self.kind == "conv" else ""
        return (
            f"hidden_size={self.hidden_size}, value_channels={self.value_channels}, "
            f"kind={self.kind!r}{kernel}"
        )


class DeltaStream(nn.Module):
    """A whole trunk on an expanded residual stream: expand, then read – sublayer – rewrite, readout.

    h = stream(x): x (B, T, d), the embeddings → h (B, T, d), the normalised readout. Every sublayer F maps
    a context (B, T, d) to (B, T, d), without norm or residual of its own; further arguments of `forward`
    go to each of them. Each rewrite is fused with the read after it, so that the state moves once
    through memory between two sublayers. It computes what this loop computes, from the same parameters:

        X = stream.expand(x)
        for read, F, residual in zip(stream.reads, stream.sublayers, stream.residuals):
            h = read(X)
            X = residual(X, F(h), context=h)
        h = stream.readout(X)

    Args:
        hidden_size: d.
        sublayers: the F's in order, attention and MLP in turn for a Transformer.
        value_channels: m.
        compress, kernel_size, parameterization, causal, norm_eps: as in Read. compress=None is "identity" for
            one value channel and "channel" for more.
        expand, expand_kernel_size: kind and kernel_size of Expand.
        sublayers_per_compressor: consecutive sublayers that share one compression (the papers share it in
            a block of attention and MLP: 2).
        residual: further keyword arguments of DeltaResidual.

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
        if len(sublayers) == 0:
            raise ValueError("`sublayers` must hold at least one module, got none")
        self.sublayers = nn.ModuleList(sublayers)
        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        self.expand = Expand(
            hidden_size, value_channels, kind=expand, kernel_size=expand_kernel_size, **factory
        )

        def read(shared: Read | None = None) -> Read:
            return Read(
                hidden_size,
                value_channels,
                compress=compress or ("identity" if value_channels == 1 else "channel"),
                kernel_size=kernel_size,
                parameterization=parameterization,
                causal=causal,
                norm_eps=norm_eps,
                shared=shared,
                **factory,
            )

        reads: list[Read] = []
        for index in range(len(sublayers)):
            first = index % sublayers_per_compressor
            reads.append(read(shared=reads[index - first] if first else None))
        self.reads = nn.ModuleList(reads)
        self.residuals = nn.ModuleList(
            DeltaResidual(hidden_size, value_channels, **residual, **factory) for _ in sublayers
        )
        self.readout = read()

    def reset_parameters(self) -> None:
        """Resets expansion, reads, residuals and readout; the sublayers are the caller's."""
        for module in (self.expand, *self.reads, *self.residuals, self.readout):
            module.reset_parameters()

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """x (B, T, d) → the normalised readout (B, T, d); `args` and `kwargs` go to every sublayer."""
        state = self.expand(x)
        state = state.unsqueeze(-1) if self.expand.value_channels == 1 else state
        arguments = self._read_arguments()
        context, value, gate = functional.read(state, **arguments[0])
        for sublayer, residual, after in zip(
            self.sublayers, self.residuals, arguments[1:], strict=True
        ):
            value, gate = residual.complete(context, None, value, gate)
            direction, value = residual.write(sublayer(context, *args, **kwargs), context, value)
            state, context, value, gate = functional.rewrite_read(
                state, direction, value, gate, eps_k=residual.eps_k, **after
            )
        return context

    def _read_arguments(self) -> list[dict[str, Any]]:
        """Arguments of every read, the last one the readout's; a shared weight is formed once."""
        weights: dict[int, Tensor | None] = {}
        arguments = []
        for read, residual in zip((*self.reads, self.readout), (*self.residuals, None), strict=True):
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


def _parameter(*size: int, **factory: Any) -> nn.Parameter:
    return nn.Parameter(torch.empty(size, **factory))
