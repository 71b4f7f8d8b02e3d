"""Read: an expanded residual stream to a sublayer's input."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ddl import functional
from ddl.ops.checks import autocast_dtype
from ddl.options import (
    STREAM_OPTIONS,
    Compress,
    Parameterization,
    check_count,
    check_left,
    check_options,
    refuse,
)
from ddl.results import ReadParameters

from .checks import check_stream
from .linear import empty_parameter, form_parameters, reset_taps_, shown

OF_THE_OWNER = {
    name: STREAM_OPTIONS[name]
    for name in ("kernel_size", "compress_parameterization", "causal", "read_init")
}


class Read(nn.Module):
    """Compress the state to d features and normalise them: X (…, d, m) → h (…, d).

    h = x/√(mean(x²) + ε) · γ, with x the compressed state. If m = 1, the state is (…, d).

    Args:
        hidden_size: d.
        value_channels: m.
        compress: "identity" (m = 1, x = X), "channel" (x_i = Σ_j w_ij X_ij) or "token" (causal over
            time, x_t,i = Σ_s Σ_j w_ijs X_{t−s,ij}, s < K). With m = 1, "channel" is a scale per
            feature and "token" a causal depthwise convolution.
        kernel_size: K, the number of taps of a "token" or a "factored" compression.
        compress_parameterization: "direct", the parameter is w, (d, m) or (d, m, K); "factored", as
            in the papers' code, w is the product of a convolution c and a read vector r (m,): for
            "token" w_ijs = r_j c_ijs with c (d, m, K); for "channel" w = c ∗ r with c (d, K), a
            same-padded correlation over the value axis. Both start with equal weights for the value
            channels.
        causal: True for a causal correlation over the value axis ("factored" "channel" only), False
            for a centred one.
        read_init: initial weight of each value channel of the current token, the initial elements
            of r if factored; None for 1/m, the mean. A norm after the read takes the scale out
            again, but a value that is computed from the raw read has it.
        norm_eps: ε; None for no norm, h = x, if the sublayer has its own.
        norm_affine: False for a norm without γ, as torch.nn.RMSNorm's elementwise_affine.
        shared: another Read of the same sizes and `compress`; this one uses its compression
            weights, kernel_size, compress_parameterization, causal and read_init, and has only a
            norm of its own. The weights stay parameters of the other Read alone.
        device, dtype: of the parameters.

    Raises:
        ValueError: an option is unknown, out of range, or without effect and not at its default.

    Source: DDL (arXiv 2601.00417, newest version), channel and token compression.
    """

    def __init__(
        self,
        hidden_size: int,
        value_channels: int = 1,
        *,
        compress: Compress = "identity",
        kernel_size: int = 4,
        compress_parameterization: Parameterization = "direct",
        causal: bool = False,
        read_init: float | None = None,
        norm_eps: float | None = 1e-5,
        norm_affine: bool = True,
        shared: Read | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_count("hidden_size", hidden_size)
        check_count("value_channels", value_channels)
        if shared is not None:
            check_left(locals(), OF_THE_OWNER, "shared=None")
        check_options(locals(), STREAM_OPTIONS)
        if compress == "identity" and value_channels != 1:
            raise ValueError(
                f'`compress` must be "channel" or "token" for {value_channels} value channels, '
                'got "identity"'
            )
        if norm_eps is None and not norm_affine:
            refuse("norm_affine", "left at True with norm_eps=None", norm_affine, ("norm_eps",))
        self.hidden_size, self.value_channels = hidden_size, value_channels
        self.compress, self.kernel_size = compress, kernel_size
        self.compress_parameterization, self.causal = compress_parameterization, causal
        self.read_init, self.norm_eps, self.norm_affine = read_init, norm_eps, norm_affine
        self._shared = self._share(shared)
        self._make_parameters(device=device, dtype=dtype)
        self.reset_parameters()

    def _share(self, owner: Read | None) -> tuple[Read, ...]:
        """Copy the owner's options; return it in a tuple, so that it is not a submodule."""
        if owner is None:
            return ()
        ours = {n: getattr(self, n) for n in ("hidden_size", "value_channels", "compress")}
        if not isinstance(owner, Read) or any(getattr(owner, n) != ours[n] for n in ours):
            expected = ", ".join(f"{name}={option!r}" for name, option in ours.items())
            raise ValueError(f"`shared` must be a Read with {expected}, got {owner!r}")
        for name in OF_THE_OWNER:
            setattr(self, name, getattr(owner, name))
        return owner._shared or (owner,)

    def _make_parameters(self, **factory: Any) -> None:
        d, m = self.hidden_size, self.value_channels
        scaled = self.norm_affine and self.norm_eps is not None
        self.norm_weight = empty_parameter(d, **factory) if scaled else None
        self.compress_weight = self.compress_kernel = self.compress_read = None
        if self._shared or self.compress == "identity":
            return
        token = self.compress == "token"
        if self.compress_parameterization == "direct":
            self.compress_weight = empty_parameter(d, m, *[self.kernel_size] * token, **factory)
        else:
            self.compress_kernel = empty_parameter(d, *[m] * token, self.kernel_size, **factory)
            self.compress_read = empty_parameter(m, **factory)

    never_decayed = nn.Module.parameters  # zero is not a neutral value for any of them

    def reset_parameters(self) -> None:
        """Reset γ to 1 and the compression to read_init for the current token's value channels."""
        if self.norm_weight is not None:
            nn.init.ones_(self.norm_weight)
        start = 1 / self.value_channels if self.read_init is None else self.read_init
        token = self.compress == "token"
        if self.compress_weight is not None and token:
            reset_taps_(self.compress_weight, start)
        elif self.compress_weight is not None:
            nn.init.constant_(self.compress_weight, start)
        if self.compress_kernel is not None and self.compress_read is not None:
            reset_taps_(self.compress_kernel, tap=0 if token else self._centre)
            nn.init.constant_(self.compress_read, start)

    @property
    def _centre(self) -> int:
        """Index of the tap that reads its own position in a same-padded correlation."""
        return self.kernel_size - 1 if self.causal else (self.kernel_size - 1) // 2

    def effective_weight(self) -> Tensor | None:
        """Return w: (d, m) for channel, (d, m, K) for token compression, None for the identity."""
        if self._shared:
            return self._shared[0].effective_weight()
        if self._forward_pre_hooks:  # a Read that shares these weights may run before this one
            form_parameters(self)
        if self.compress_kernel is None or self.compress_read is None:
            return self.compress_weight
        if self.compress == "token":
            return self.compress_kernel * self.compress_read[:, None]
        # w_ij = Σ_s c_is r_{j−s+centre}: the correlation, then r, as a (K, m) matrix of shifted r.
        m, taps, centre = self.value_channels, self.kernel_size, self._centre
        padded = F.pad(self.compress_read, (taps, taps))
        shifted = torch.stack([padded[taps + centre - s :][:m] for s in range(taps)])
        return self.compress_kernel @ shifted

    def parameters_of(
        self, weight: Tensor | None, context_dtype: torch.dtype | None = None
    ) -> ReadParameters:
        """Compression by `weight`, which `effective_weight` returns, and norm."""
        norm_weight, norm_eps = self.norm_weight, self.norm_eps
        return ReadParameters(weight, norm_weight, norm_eps=norm_eps, context_dtype=context_dtype)

    def forward(
        self,
        state: Tensor,
        *,
        return_compressed: bool = False,
        document_starts: Tensor | None = None,
    ) -> Any:
        """Map X (…, d, m), or (…, d) if m = 1, to h (…, d).

        return_compressed: return (h, x) instead, x (…, d) being the raw read before the norm.
        document_starts: (…, T) bool, the tokens with which a document starts; a "token" compression
            does not look beyond the start of its own. None for one document per sequence.
        Raises ValueError for another shape, TypeError for an unsupported dtype.
        """
        d, m = self.hidden_size, self.value_channels
        size, over_time = (d,) if m == 1 else (d, m), self.compress == "token"
        check_stream("state", state, size, over_time=over_time, document_starts=document_starts)
        starts = document_starts if over_time else None
        state = state.unsqueeze(-1) if self.value_channels == 1 else state
        dtype = autocast_dtype(state)
        if not return_compressed:
            parameters = self.parameters_of(self.effective_weight(), dtype)
            return functional.read_with(state, parameters, starts)[0].context
        x = functional.read_with(state, self.raw(state), starts)[0].context
        normalised, _ = functional.read_with(x.unsqueeze(-1), self.parameters_of(None, dtype))
        return normalised.context, x

    def raw(self, state: Tensor) -> ReadParameters:
        """The compression alone, for the raw read x in the state's dtype."""
        return ReadParameters(self.effective_weight(), norm_eps=None, context_dtype=state.dtype)

    def extra_repr(self) -> str:
        return shown(self) + ", shared" * bool(self._shared)


def make_reads(
    hidden_size: int,
    value_channels: int,
    *,
    sublayers: int,
    sublayers_per_compressor: int,
    own: dict[str, Any],
    **common: Any,
) -> nn.ModuleList:
    """The reads before so many sublayers, of which consecutive ones share a compression.

    own: options of Read for those that have a compression of their own. common: for all.
    """
    reads: list[Read] = []
    for index in range(sublayers):
        first = index - index % sublayers_per_compressor
        options = own if first == index else {"shared": reads[first]}
        reads.append(Read(hidden_size, value_channels, **options, **common))
    return nn.ModuleList(reads)
