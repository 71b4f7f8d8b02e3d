"""The fused, differentiable operators as functions, with the signatures of `ddl.reference`.

Names: the state X (…, d, m) is the residual stream with m value channels; the direction k (…, d) is
a sublayer's output; the value v (…, m) is written along k; the gate β (…,) scales the write; the
context h (…, d) is a sublayer's input. `…` stands for any batch dimensions. Tensors may be float32,
bfloat16 and float16 in any mix, or all float64. Sums, v and β are float32 (float64 for float64).

Up to 8 rewrites may follow each other before the next read: their operands have an axis n, k
(…, n, d), v (…, n, m) and β (…, n), and so have the weights of a read that computes values and
gates for them. The state crosses memory once, whatever n.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ddl.ops import declarations
from ddl.ops.checks import (
    as_gate,
    autocast_dtype,
    check_context_dtype,
    check_is_tensor,
)
from ddl.options import Erase, check_choice, check_count, check_positive
from ddl.results import (
    ERASE,
    Chain,
    DeltaRuleResult,
    ReadParameters,
    ReadResult,
    RewriteReadResult,
    Write,
)

__all__ = ["delta_rule", "expand", "read", "rewrite", "rewrite_read", "rewrite_read_chained"]

FLOATS = (float, torch.SymFloat)  # native code checks these, and integers


def rewrite(
    state: Tensor,
    direction: Tensor,
    value: Tensor,
    gate: Tensor,
    *,
    eps_k: float,
    erase: Erase = "tied",
) -> Tensor:
    """Apply the delta rule X' = X + β k̂ (vᵀ − k̂ᵀX), with k̂ = k/√(|k|² + ε_k²).

    Args:
        state: X (…, d, m).
        direction: k (…, d), of any norm; (…, n, d) for n rewrites, in order, of which X' is rounded
            once. If |k|² overflows (|k| > 1.8e19, or 1.3e154 if the state is float64), the token's
            X' and gradients are NaN.
        value: v (…, m), or (…, n, m).
        gate: β (…,), or (…, n), meant to be in [0, 2]: 0 keeps X bit for bit if k, v and k̂ᵀX are
            finite, 1 makes k̂ᵀX' = vᵀ, 2 reflects. No clamping: outside [0, 2] the write overshoots,
            |1 − β| > 1.
        eps_k: ε_k, in units of |k|.
        erase: the gate α of X' = X + k̂ (β vᵀ − α k̂ᵀX). "tied": α = β, the delta rule | "none":
            α = 0, nothing is erased, and k̂ᵀX is not computed.

    Returns:
        X' (…, d, m) in the dtype of the state.

    Raises:
        ValueError: a shape, device or number does not fit. TypeError: a dtype or layout does not.

    Source: DDL (arXiv 2601.00417), eq. 2.5.
    """
    return write_to(state, _write(state, direction, value, gate, eps_k, erase))


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
    document_starts: Tensor | None = None,
) -> ReadResult:
    """Compress the state to d features, normalise them, and compute the next value and gate.

        x = compress(X)              h = x/√(mean(x²) + ε_n) · γ
        v = φ(W_v z + b_v)           β = 2·sigmoid(w_β·h + b_β)

    Args:
        state: X (…, d, m).
        compress: w. None: x is the state (m = 1 only) | (d, m): x_i = Σ_j w_ij X_ij | (d, m, K),
            causal over the time axis −3: x_t,i = Σ_s Σ_j w_ijs X_{t−s,ij}, zeros before t = 0.
        norm_weight: γ (d,); None for ones.
        norm_eps: ε_n; None for no normalisation, h = x · γ.
        gate_weight, gate_bias: w_β (d,) and b_β (); no gate without the weight.
        value_weight, value_bias: W_v (m, d) and b_v (m,); no value without the weight. For n
            rewrites to come these four are (n, d), (n,), (n, m, d) and (n, m).
        value_scale: s for φ = s·sigmoid; None for φ = identity.
        value_from: "context", z = h | "compressed", z = x.
        context_dtype: dtype of h; None for autocast's dtype if autocast is on, else the state's.
        document_starts: with (d, m, K) only, (…, T) bool: the tokens with which a document starts;
            no token looks back beyond the start of its own. None for one document per sequence.

    Returns:
        ReadResult(context h (…, d), value v (…, m) or None, gate β (…,) or None), with an axis n as
        above if the weights have it.

    Raises:
        ValueError: a shape, device or number does not fit. TypeError: a dtype or layout does not.

    Source: DDL (arXiv 2601.00417); the gate is eq. 2.6.
    """
    weights = compress, norm_weight, gate_weight, gate_bias, value_weight, value_bias
    parameters = _read(state, weights, norm_eps, value_scale, value_from, context_dtype)
    result, _ = read_with(state, parameters, document_starts)
    return result


def rewrite_read(
    state: Tensor,
    direction: Tensor,
    value: Tensor,
    gate: Tensor,
    *,
    eps_k: float,
    erase: Erase = "tied",
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
    document_starts: Tensor | None = None,
) -> RewriteReadResult:
    """Rewrite the state, then read the result, in one pass over memory: the step between sublayers.

    Arguments and errors are those of `rewrite` and `read`. The read uses X' after rounding to the
    state's dtype.

    Returns:
        RewriteReadResult(state X' (…, d, m), context (…, d), value (…, m) or None, gate (…,) or
        None).
    """
    weights = compress, norm_weight, gate_weight, gate_bias, value_weight, value_bias
    parameters = _read(state, weights, norm_eps, value_scale, value_from, context_dtype)
    write = _write(state, direction, value, gate, eps_k, erase)
    result, _ = step(state, write, parameters, document_starts)
    return result


def rewrite_read_chained(
    state: Tensor,
    direction: Tensor,
    value: Tensor,
    gate: Tensor,
    *,
    eps_k: float,
    chain: Chain,
    erase: Erase = "tied",
    document_starts: Tensor | None = None,
    value_from: str = "context",
    **options: Any,
) -> tuple[RewriteReadResult, Chain]:
    """Apply `rewrite_read`, with its options, so that not every state is stored for the backward.

    Returns its result, and the chain for the next call, which gets the new state.
    """
    read = ReadParameters(**options)
    parameters = _read(state, read[:6], *read[6:8], value_from, read.context_dtype)
    write = _write(state, direction, value, gate, eps_k, erase)
    return step(state, write, parameters, document_starts, chain=chain)


def delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    g: Tensor | None = None,
    *,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    document_starts: Tensor | None = None,
) -> DeltaRuleResult:
    """Apply the delta rule over time: every token rewrites a state S (K, V) for each of H heads.

        S ← exp(g_t) S          S ← S + k (β (vᵀ − kᵀS)), n times          y_t = scale · Sᵀ q

    The number of heads `·` divides H, and each head serves as many states that follow each other.

    Args:
        q: queries (B, T, ·, K), or with a multiple of H heads, several queries to one state.
        k: keys (B, T, ·, K), of any norm; (B, T, n, ·, K) for n steps per token, in order.
        v: values (B, T, ·, V), or (B, T, n, ·, V).
        beta: β (B, T, H), or (B, T, n, H), meant to be in [0, 2] for unit keys. No clamping.
        g: log decay (B, T, H), or (B, T, H, K) for one per key feature; None for none. It is
            applied once per token, before the first step.
        scale: None for K^-½.
        initial_state: S (B, H, K, V); None for zeros.
        document_starts: (B, T) bool, the tokens at which the state begins again from zeros. None
            for one document per sequence, which the initial state belongs to.

    q, k and v may be float32, bfloat16 and float16 in any mix, or all float64. β, g, states and all
    sums are float32 (float64 for float64); β, g and states in half precision are converted.
    Autocast changes nothing. On a CPU the recurrence runs natively, in one pass over the state per
    step. On other devices flash-linear-attention runs if it is installed and takes the problem (q,
    k and v in one 16-bit dtype on a CUDA device, no documents, K ≤ 256; docs/over-time.md), else
    chunks in plain PyTorch.

    Returns:
        DeltaRuleResult(y (B, T, H or the queries' heads, V) in the dtype of v, final_state
        (B, H, K, V)).

    Raises:
        ValueError: a shape, device or number does not fit. TypeError: a dtype or layout does not.

    Source: DeltaNet (arXiv 2406.06484) §2.2; Gated DeltaNet (arXiv 2412.06464) eq. 10; for n steps
    and the layouts of heads Chen's note on DeltaProduct (2025).
    """
    check_is_tensor("q", q)
    if type(scale) not in FLOATS:
        check_positive("scale", scale, optional=True)
    tensors = (q, k, v, as_gate(beta, q), as_gate(g, q), as_gate(initial_state, q))
    needed = any(isinstance(tensor, Tensor) and tensor.requires_grad for tensor in tensors)
    arguments = (*tensors, document_starts, scale, torch.is_grad_enabled() and needed)
    y, final_state, *_ = declarations.delta_rule.call(*arguments)
    return DeltaRuleResult(y, final_state)


def expand(
    x: Tensor,
    weight: Tensor | None = None,
    *,
    value_channels: int,
    document_starts: Tensor | None = None,
) -> Tensor:
    """Expand embeddings x (…, d) to a state X (…, d, m) with m value channels.

    Args:
        x: (…, d), or (…, T, d) with a weight.
        weight: None repeats x in every value channel | (d, m, K), a causal depthwise convolution
            over the time axis −2: X_t,ij = Σ_s w_ijs x_{t−s,i}, zeros before t = 0.
        value_channels: m.
        document_starts: as in `read`, with a weight only.

    Returns:
        X (…, d, m) in the dtype of x.

    Raises:
        ValueError: a shape, device or number does not fit. TypeError: a dtype or layout does not.
    """
    if type(value_channels) not in (int, torch.SymInt):
        check_count("value_channels", value_channels)
    state, _ = expand_to(x, weight, value_channels, document_starts)
    return state


# --- the same with records, for modules -----------------------------------------------------------
#
# Values and gates are in float32 (float64 for a float64 state). `continues`: the tokens are a piece
# of a sequence, without gradients. Then `pending` or `before` is what the piece before left, None
# at the start of the sequence. It belongs to the first document, unless token 0 starts one.


def write_to(state: Tensor, write: Write) -> Tensor:
    """Return `rewrite` of the state."""
    direction, value, gate, eps_k, erase = write
    new_state: Tensor
    new_state, _ = declarations.rewrite.call(
        state, direction, value, gate, eps_k, ERASE.index(erase), _may_record()
    )
    return new_state


def read_with(
    state: Tensor,
    parameters: ReadParameters,
    document_starts: Tensor | None = None,
    *,
    pending: Tensor | None = None,
    continues: bool = False,
) -> tuple[ReadResult, Tensor | None]:
    """Return `read` of the state with these parameters, and what its tokens leave.

    pending: what the tokens before add to the compressed x of the first K − 1 of these,
    (…, K − 1, d), in the dtype of gates.
    """
    saves = not continues and _may_record()
    context, value, gate, _, _, left = declarations.read.call(
        state, *parameters[:6], document_starts, *parameters[6:], pending, saves
    )
    return ReadResult(context, value, gate), left


def step(
    state: Tensor,
    write: Write | None,
    parameters: ReadParameters,
    document_starts: Tensor | None = None,
    *,
    chain: Chain | None = None,
    pending: Tensor | None = None,
    continues: bool = False,
) -> tuple[RewriteReadResult, Any]:
    """Return `rewrite_read` of the state, the step between two sublayers, and what it leaves.

    write: None to read the state alone.
    chain: the rewrites that led to the state, so that not every one is stored for the backward;
    left is the chain for the next step, which gets the new state. pending: as in `read_with`.
    """
    if write is None:
        read, left = read_with(
            state, parameters, document_starts, pending=pending, continues=continues
        )
        return RewriteReadResult(state, *read), left if continues else chain
    direction, value, gate, eps_k, erase = write
    anchor = links = None
    if chain is not None:
        chain = chain.before(write)
        anchor, links = chain.anchor, list(chain.tensors)
    saves = not continues and _may_record()
    new_state, context, new_value, new_gate, stats, _, left = declarations.rewrite_read.call(
        *(state, direction, value, gate, *parameters[:6], document_starts, links),
        *(eps_k, ERASE.index(erase), *parameters[6:], anchor, pending, saves),
    )
    # Plain PyTorch returns no statistics: every state is stored.
    if chain is not None and stats is not None:
        if type(direction) is not Tensor and hasattr(direction, "trigger_wait"):
            # The result of a collective, for which the dispatcher does not look in optional lists.
            write = write._replace(direction=direction.trigger_wait())
        chain = chain.after(state, write, stats)
    result = RewriteReadResult(new_state, context, new_value, new_gate)
    return result, left if continues else chain


def expand_to(
    x: Tensor,
    weight: Tensor | None,
    value_channels: int,
    document_starts: Tensor | None = None,
    *,
    before: Tensor | None = None,
    continues: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Return `expand` of x (…, T, d), and what its tokens leave.

    before: x of the K − 1 tokens before, (…, K − 1, d).
    """
    saves = not continues and _may_record()
    state, left = declarations.expand.call(
        x, weight, document_starts, value_channels, before, saves
    )
    return state, left


# --- what torch would convert, or refuse without a sentence ---------------------------------------


def _may_record() -> bool:
    """Whether gradients are recorded, or may be when a graph runs that is traced now."""
    return torch.is_grad_enabled() or torch.compiler.is_compiling()


def _write(
    state: Tensor, direction: Tensor, value: Tensor, gate: Tensor, eps_k: float, erase: str
) -> Write:
    """Return the record; a value or gate in half precision is converted."""
    if erase not in ERASE:
        check_choice("erase", erase, ERASE)
    if type(eps_k) not in FLOATS:
        check_positive("eps_k", eps_k)
    return Write(direction, as_gate(value, state), as_gate(gate, state), eps_k, erase)


def _read(
    state: Tensor,
    weights: tuple[Any, ...],
    norm_eps: float | None,
    value_scale: float | None,
    value_from: str,
    context_dtype: torch.dtype | None,
) -> ReadParameters:
    """Return the record, with autocast's dtype for the context if none is requested."""
    if not isinstance(state, Tensor):
        check_is_tensor("state", state)
    if type(norm_eps) not in FLOATS:
        check_positive("norm_eps", norm_eps, optional=True)
    if value_scale is not None and type(value_scale) not in FLOATS:
        check_positive("value_scale", value_scale)
    if value_from != "context":
        check_choice("value_from", value_from, ("context", "compressed"))
    if context_dtype is None:
        context_dtype = autocast_dtype(state)  # the next sublayer's products run in it
    else:
        check_context_dtype(state, context_dtype)
    others = norm_eps, value_scale, value_from == "compressed", context_dtype
    return ReadParameters._make(weights + others)
