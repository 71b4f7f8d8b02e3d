"""The operators as functions: fused, differentiable, the same signatures as `ddl.reference`.

Vocabulary: the state X (…, d, m) is the residual stream with m value channels, the direction
k (…, d) a sublayer's output, the value v (…, m) what is written, the gate β (…,) how much of it,
the context h (…, d) what a sublayer reads. Storage types are float32, bfloat16 and float16 in any
mix, or float64 throughout; sums are kept in float32 (float64); v and β are float32 (float64).
"""

from __future__ import annotations

import torch
from torch import Tensor

from ddl import ops  # noqa: F401  registers torch.ops.ddl
from ddl.ops.checks import check_context_dtype, check_count, check_positive, check_tensors
from ddl.ops.outputs import gate_dtype
from ddl.options import check_choice
from ddl.results import ReadResult, RewriteReadResult

__all__ = ["expand", "read", "rewrite", "rewrite_read"]


def rewrite(
    state: Tensor, direction: Tensor, value: Tensor, gate: Tensor, *, eps_k: float
) -> Tensor:
    """X' = X + β k̂ (v − k̂ᵀX)ᵀ with k̂ = k/√(|k|² + ε_k²).

    Args:
        state: X (…, d, m).
        direction: k (…, d), of any length.
        value: v (…, m).
        gate: β (…,), meant to be in [0, 2]: 0 keeps X bit for bit, 1 makes k̂ᵀX' = vᵀ, 2 reflects.
            Any real number is taken as it is; beyond [0, 2] the write overshoots, |1 − β| > 1.
        eps_k: ε_k, in units of |k|.

    Returns:
        X' (…, d, m) in the dtype of the state.

    Raises:
        ValueError: a shape, device or number that does not fit; TypeError: a dtype or layout.
    """
    check_tensors(state=state, direction=direction, value=value, gate=gate)
    check_positive("eps_k", eps_k)
    value, gate = _gates(state, value, gate)
    return torch.ops.ddl.rewrite(state, direction, value, gate, eps_k)[0]


def read(
    state: Tensor,
    *,
    compress: Tensor | None = None,
    norm_weight: Tensor | None = None,
    norm_eps: float | None = 1e-5,
    gate_weight: Tensor | None = None,
    gate_bias: Tensor | None = None,
    value_weight: Tensor | None = None,
    value_bias: Tensor | None = None,
    value_scale: float | None = None,
    value_from: str = "context",
    context_dtype: torch.dtype | None = None,
) -> ReadResult:
    """x = compress(X), h = x/√(mean x² + ε_n)·γ, v = φ(W_v z + b_v), β = 2·sigmoid(w_β·h + b_β).

    Args:
        state: X (…, d, m).
        compress: None (m = 1: x is the state) | (d, m), x_i = Σ_j w_ij X_ij | (d, m, K), causal
            over the time axis −3: x_t,i = Σ_s Σ_j w_ijs X_{t−s,ij} with zeros before t = 0.
        norm_weight: γ (d,), None for ones.
        norm_eps: ε_n; None for no normalisation.
        gate_weight, gate_bias: w_β (d,) and b_β (); no gate without the weight.
        value_weight, value_bias: W_v (m, d) and b_v (m,); no value without the weight.
        value_scale: φ = scale·sigmoid; None for φ = identity.
        value_from: z, "context" (h) or "compressed" (x).
        context_dtype: dtype of h; by default autocast's where autocast is on, else the state's.

    Returns:
        ReadResult(context (…, d), value (…, m) or None, gate (…,) or None).

    Raises:
        ValueError: a shape, device or number that does not fit; TypeError: a dtype or layout.
    """
    arguments = _read_arguments(
        state, compress, norm_weight, norm_eps, gate_weight, gate_bias, value_weight, value_bias,
        value_scale, value_from, context_dtype,
    )  # fmt: skip
    context, new_value, new_gate, _, _ = torch.ops.ddl.read(state, *arguments)
    return ReadResult(
        context,
        None if value_weight is None else new_value,
        None if gate_weight is None else new_gate,
    )


def rewrite_read(
    state: Tensor,
    direction: Tensor,
    value: Tensor,
    gate: Tensor,
    *,
    eps_k: float,
    compress: Tensor | None = None,
    norm_weight: Tensor | None = None,
    norm_eps: float | None = 1e-5,
    gate_weight: Tensor | None = None,
    gate_bias: Tensor | None = None,
    value_weight: Tensor | None = None,
    value_bias: Tensor | None = None,
    value_scale: float | None = None,
    value_from: str = "context",
    context_dtype: torch.dtype | None = None,
) -> RewriteReadResult:
    """What happens between two sublayers, in one pass over the state: `rewrite`, then `read` of X'.

    Arguments and errors are those of `rewrite` and `read`.

    Returns:
        RewriteReadResult(state (…, d, m), context (…, d), value (…, m) or None, gate (…,) or None).
    """
    arguments = _read_arguments(
        state, compress, norm_weight, norm_eps, gate_weight, gate_bias, value_weight, value_bias,
        value_scale, value_from, context_dtype,
    )  # fmt: skip
    check_tensors(direction=direction, value=value, gate=gate)
    check_positive("eps_k", eps_k)
    value, gate = _gates(state, value, gate)
    new_state, context, new_value, new_gate, *_ = torch.ops.ddl.rewrite_read(
        state, direction, value, gate, eps_k, *arguments
    )
    return RewriteReadResult(
        new_state,
        context,
        None if value_weight is None else new_value,
        None if gate_weight is None else new_gate,
    )


def expand(x: Tensor, weight: Tensor | None = None, *, value_channels: int) -> Tensor:
    """x (…, d) → X (…, d, m): repetition, or X_t,ij = Σ_s w_ijs x_{t−s,i} over the time axis −2.

    Args:
        x: (…, d), or (…, T, d) with a weight.
        weight: (d, m, K); None repeats x in every value channel.
        value_channels: m.

    Returns:
        (…, d, m) in the dtype of x.
    """
    check_tensors(x=x, weight=weight)
    check_count("value_channels", value_channels)
    return torch.ops.ddl.expand(x, weight, value_channels)


def _gates(state: Tensor, *gates: Tensor) -> tuple[Tensor, ...]:
    """Values and gates in float32; anything but a half-precision one is left for the checks."""
    half = (torch.bfloat16, torch.float16)
    dtype = gate_dtype(state)
    return tuple(gate.to(dtype) if gate.dtype in half else gate for gate in gates)


def _read_arguments(
    state: Tensor,
    compress: Tensor | None,
    norm_weight: Tensor | None,
    norm_eps: float | None,
    gate_weight: Tensor | None,
    gate_bias: Tensor | None,
    value_weight: Tensor | None,
    value_bias: Tensor | None,
    value_scale: float | None,
    value_from: str,
    context_dtype: torch.dtype | None,
) -> tuple[object, ...]:
    """The read's arguments as the operator takes them."""
    check_choice("value_from", value_from, ("context", "compressed"))
    check_tensors(
        state=state,
        compress=compress,
        norm_weight=norm_weight,
        gate_weight=gate_weight,
        gate_bias=gate_bias,
        value_weight=value_weight,
        value_bias=value_bias,
    )
    check_positive("norm_eps", norm_eps, optional=True)
    check_positive("value_scale", value_scale, optional=True)
    check_context_dtype(state, context_dtype)  # also what is no dtype, which no schema lets in
    if context_dtype is None:
        context_dtype = _autocast_dtype(state)
    return (
        compress, norm_weight, norm_eps, gate_weight, gate_bias, value_weight, value_bias,
        value_scale, value_from == "compressed", context_dtype,
    )  # fmt: skip


def _autocast_dtype(state: Tensor) -> torch.dtype | None:
    """What the next sublayer's matrix products will want, where autocast decides it."""
    device = state.device.type
    if device == "meta" or state.dtype == torch.float64 or not torch.is_autocast_enabled(device):
        return None
    return torch.get_autocast_dtype(device)
