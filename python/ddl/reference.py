"""The equations of Deep Delta Learning in plain PyTorch; the fused operators are tested against it.

    X'  =  X + β k̂ (vᵀ − k̂ᵀ X)            X: (d, m)   k̂: (d,)   v: (m,)   β ∈ [0, 2]

Read it beside the paper (arXiv 2601.00417). Equation and section numbers are those of its first
version; the names channel, token and expand are those of its third. The signatures are those of
`ddl.functional`. Autograd can differentiate everything here any number of times.

All inputs are converted to float32 (to float64 if the state is float64) before computing; only
states and contexts are rounded back to the storage dtype. `…` stands for any batch dimensions. If a
function needs a time axis, it is the last batch dimension: (…, T, d) and (…, T, d, m).
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
import torch.nn.functional as F
from torch import Tensor

from ddl.results import DeltaRuleResult, ReadResult, RewriteReadResult

__all__ = [
    "delta_rule",
    "determinant",
    "eigenvalues",
    "expand",
    "operator",
    "read",
    "rewrite",
    "rewrite_read",
]


def rewrite(
    state: Tensor,
    direction: Tensor,
    value: Tensor,
    gate: Tensor,
    *,
    eps_k: float,
    erase: str = "tied",
) -> Tensor:
    """The delta rule X' = X + β k̂ (vᵀ − k̂ᵀX), eq. 2.5, with k̂ = k/√(|k|² + ε_k²) as in eq. 2.3.

    state: X (…, d, m). direction: k (…, d), of any norm. value: v (…, m). gate: β (…,).
    eps_k: ε_k. erase: "tied" | "none", X' = X + β k̂ vᵀ.
    n rewrites one after the other have k (…, n, d), v (…, n, m) and β (…, n): with A_j = I − β_j
    k̂_j k̂_jᵀ, or I for "none", X' = A_n … A_1 X + Σ_j A_n … A_{j+1} β_j k̂_j v_jᵀ.
    Returns X' (…, d, m) in the state's dtype, rounded once. Raises ValueError for another `erase`.

    If β = 0, X' equals X bit for bit (except that −0.0 may become +0.0) if k, v and k̂ᵀX are
    finite, as 0·∞ is NaN. If k = 0, X' equals X for eps_k > 0 and is NaN for eps_k = 0. If |k|²
    overflows, X' is NaN.
    """
    if erase not in ("tied", "none"):
        raise ValueError(f'`erase` must be "tied" or "none", got {erase!r}')
    X, k, v, beta = _widen(state, state, direction, value, gate)
    k = _unit(k, eps_k)  # k̂ (…, d)
    if direction.ndim < state.ndim:
        X = _rewrite(X, k, v, beta, erase)
    else:
        for j in range(direction.shape[-2]):
            X = _rewrite(X, k[..., j, :], v[..., j, :], beta[..., j], erase)
    return X.to(state.dtype)


def _rewrite(X: Tensor, k: Tensor, v: Tensor, beta: Tensor, erase: str) -> Tensor:
    if erase == "none":
        return X + beta[..., None, None] * k[..., :, None] * v[..., None, :]
    with without_autocast(X):
        p = torch.einsum("...d,...dm->...m", k, X)  # k̂ᵀX (…, m), the current readout
    return X + beta[..., None, None] * k[..., :, None] * (v - p)[..., None, :]  # (…, d, m)


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
        v = φ(W_v z + b_v)           β = 2·sigmoid(w_β·h + b_β), eq. 2.6

    state: X (…, d, m).
    compress: w. None: identity (m = 1 only) | (d, m): channel, x_i = Σ_j w_ij X_ij | (d, m, K):
        token, x_t,i = Σ_s Σ_j w_ijs X_{t−s,ij}; tap s reads the state s steps back, zeros before
        t = 0.
    norm_weight: γ (d,); None for ones. norm_eps: ε_n; None skips the normalisation, h = x · γ.
    gate_weight: w_β (d,); None for no gate. gate_bias: b_β ().
    value_weight: W_v (m, d); None for no value. value_bias: b_v (m,).
        For n rewrites to come: w_β (n, d), b_β (n,), W_v (n, m, d), b_v (n, m).
    value_scale: s for φ = s·sigmoid; None for φ = identity.
    value_from: "context", z = h | "compressed", z = x.
    context_dtype: dtype of h; None for the state's.
    document_starts: (…, T) bool, the tokens with which a document starts; a token read does not
        look beyond the start of its own. None for one document per sequence.

    Returns ReadResult(context h (…, d), value v (…, m), gate β (…,)); for n, v (…, n, m) and β
    (…, n).
    Raises ValueError if `value_from` is unknown or `compress` does not fit the state.
    """
    if value_from not in ("context", "compressed"):
        raise ValueError(f'`value_from` must be "context" or "compressed", got {value_from!r}')
    (X,) = _widen(state, state)
    x = h = _compress(X, compress, document_starts)  # (…, d)
    if norm_eps is not None:
        h = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + norm_eps)
    if norm_weight is not None:
        h = h * norm_weight.to(h.dtype)
    z = h if value_from == "context" else x
    return ReadResult(
        context=h.to(context_dtype or state.dtype),
        value=_value(z, value_weight, value_bias, value_scale),
        gate=_gate(h, gate_weight, gate_bias),
    )


def rewrite_read(
    state: Tensor,
    direction: Tensor,
    value: Tensor,
    gate: Tensor,
    *,
    eps_k: float,
    erase: str = "tied",
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
    """Rewrite the state, then read the result: the step between two sublayers.

    Arguments and errors are those of `rewrite` and `read`. The read uses X' after rounding to the
    state's dtype. Returns RewriteReadResult(state X', context, value, gate).
    """
    state = rewrite(state, direction, value, gate, eps_k=eps_k, erase=erase)
    found = read(
        state,
        compress=compress,
        norm_weight=norm_weight,
        norm_eps=norm_eps,
        gate_weight=gate_weight,
        gate_bias=gate_bias,
        value_weight=value_weight,
        value_bias=value_bias,
        value_scale=value_scale,
        value_from=value_from,
        context_dtype=context_dtype,
        document_starts=document_starts,
    )
    return RewriteReadResult(state, *found)


def expand(
    x: Tensor,
    weight: Tensor | None = None,
    *,
    value_channels: int,
    document_starts: Tensor | None = None,
) -> Tensor:
    """Expand embeddings x (…, T, d) to a state X (…, T, d, m), in the dtype of x.

    weight: None repeats x in every value channel | (d, m, K), a causal depthwise convolution over
    time, X_t,ij = Σ_s w_ijs x_{t−s,i}, zeros before t = 0. A weight whose tap 0 is 1 and whose
    other taps are 0 repeats x, too. document_starts: as in `read`. Raises ValueError for a weight
    of another shape.
    """
    if weight is None:
        return x[..., None].repeat(*(1,) * x.ndim, value_channels)
    d, m = x.shape[-1], value_channels
    if weight.ndim != 3 or weight.shape[:2] != (d, m):
        raise ValueError(f"`weight` must have shape ({d}, {m}, K), got {tuple(weight.shape)}")
    if x.ndim < 2:
        raise ValueError(f"`x` must have shape (…, time, hidden_size), got {tuple(x.shape)}")
    u, w = _widen(x, x, weight)
    X = u[..., None] * w[..., 0]  # (…, T, d, m)
    for s in range(1, w.shape[-1]):
        X = X + _delay(u, s, document_starts)[..., None] * w[..., s]
    return X.to(x.dtype)


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
    """The delta rule over time: a state S (K, V) for each of H heads, rewritten by every token.

        S ← exp(g_t) S          S ← S + k (β (vᵀ − kᵀS)), n times          y_t = scale · Sᵀ q

    q: (B, T, ·, K). k: (B, T, ·, K). v: (B, T, ·, V). beta: β (B, T, H). For n steps per token k
        and v have an axis, (B, T, n, ·, K) and (B, T, n, ·, V), and β is (B, T, n, H). The number
        of heads `·` divides H, and each serves as many states that follow each other; q may also
        have a multiple of H, several queries to one state.
    g: log decay (B, T, H), or (B, T, H, K) for one per key feature; None for no decay. The state
        decays once per token, before the first step.
    scale: None for K^-½. initial_state: S (B, H, K, V); None for zeros.
    document_starts: (B, T) bool, the tokens at which the state begins again from zeros.

    Returns DeltaRuleResult(y (B, T, H or the queries' heads, V) in v's dtype, final_state
    (B, H, K, V) in float32, or float64).
    Source: DeltaNet (arXiv 2406.06484) §2.2; Gated DeltaNet (arXiv 2412.06464) eq. 10; n steps are
    DeltaProduct's (arXiv 2502.10297).
    """
    if k.ndim == 4:
        k, v, beta = k.unsqueeze(2), v.unsqueeze(2), beta.unsqueeze(2)
    (B, T, n, H), K, V = beta.shape, k.shape[-1], v.shape[-1]
    dtype = v.dtype
    q, k, v, beta = _widen(v, q, k, v, beta)
    queries = max(1, q.shape[2] // H)  # of one state
    q = torch.unflatten(q.repeat_interleave(queries * H // q.shape[2], 2), 2, (H, queries))
    k, v = (x.repeat_interleave(H // x.shape[3], 3) for x in (k, v))  # (B, T, n, H, ·)
    S = q.new_zeros(B, H, K, V) if initial_state is None else _widen(v, initial_state)[0]
    if g is not None:
        (decay,) = _widen(v, g if g.ndim == 4 else g[..., None])
        decay = decay.exp()[..., None]  # (B, T, H, K or 1, 1)
    y = [q.new_empty(B, 0, H * queries, V)]
    with without_autocast(q):
        for t in range(T):
            if document_starts is not None:
                S = torch.where(document_starts[:, t, None, None, None], 0, S)
            if g is not None:
                S = decay[:, t] * S
            for j in range(n):
                p = torch.einsum("bhk,bhkv->bhv", k[:, t, j], S)  # kᵀS, the current readout
                write = beta[:, t, j, :, None] * (v[:, t, j] - p)
                S = S + k[:, t, j, :, :, None] * write[:, :, None, :]
            y.append(torch.einsum("bhqk,bhkv->bhqv", q[:, t], S).flatten(1, 2).unsqueeze(1))
    scale = K**-0.5 if scale is None else scale
    return DeltaRuleResult((scale * torch.cat(y, 1)).to(dtype), S)


def operator(direction: Tensor, gate: Tensor, eps_k: float = 0.0) -> Tensor:
    """The delta operator A = I − β k̂k̂ᵀ, (…, d, d), eq. 2.3 and 2.4: X' = A X + β k̂ vᵀ.

    direction: k (…, d). gate: β (…,). eps_k: ε_k, in units of |k|. On the stacked columns of a
    state it acts as I_m ⊗ A (§3.1).
    """
    k, beta = _widen(direction, direction, gate)
    k = _unit(k, eps_k)
    identity = torch.eye(k.shape[-1], dtype=k.dtype, device=k.device)
    return identity - beta[..., None, None] * k[..., :, None] * k[..., None, :]


def eigenvalues(direction: Tensor, gate: Tensor, eps_k: float = 0.0) -> Tensor:
    """Eigenvalues of `operator` in closed form, (…, d): that of k, then d − 1 ones (Thm. 3.1).

    The eigenvalue of the eigenvector k is 1 − β|k̂|². For ε_k = 0 it is the paper's 1 − β; ε_k > 0
    moves it towards 1, because |k̂|² = |k|²/(|k|² + ε_k²) < 1.
    """
    along_k = determinant(direction, gate, eps_k)
    ones = torch.ones_like(direction[..., 1:], dtype=along_k.dtype)
    return torch.cat([along_k[..., None], ones], dim=-1)


def determinant(
    direction: Tensor, gate: Tensor, eps_k: float = 0.0, *, value_channels: int = 1
) -> Tensor:
    """det A = 1 − β|k̂|² in closed form, (…,).

    For (d, m) states, where the operator is I_m ⊗ A, it is that to the power m (Cor. 3.2).
    """
    k, beta = _widen(direction, direction, gate)
    norm2 = k.square().sum(-1)
    return (1 - beta * norm2 / (norm2 + eps_k**2)) ** value_channels


def _widen(like: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
    """Convert the tensors to float64 if `like` is float64, else to float32."""
    dtype = torch.float64 if like.dtype == torch.float64 else torch.float32
    return tuple(t.to(dtype) for t in tensors)


def without_autocast(x: Tensor) -> AbstractContextManager[object]:
    """Switch autocast off around a contraction, which it would otherwise compute in 16 bits."""
    device = x.device.type
    if device == "meta" or not torch.is_autocast_enabled(device):  # meta tensors have no autocast
        return nullcontext()
    return torch.autocast(device, enabled=False)


def _unit(k: Tensor, eps_k: float) -> Tensor:
    """k̂ = k/√(|k|² + ε_k²), (…, d); NaN if |k|² overflows, because k/∞ would be no direction."""
    square = k.square().sum(-1, keepdim=True)
    square = torch.where(square.isinf(), torch.nan, square)
    return k / torch.sqrt(square + eps_k**2)


def _delay(x: Tensor, steps: int, document_starts: Tensor | None) -> Tensor:
    """x_{t−steps} for x (…, T, d), zeros where that lies before t = 0 or in another document."""
    T = x.shape[-2]
    delayed = F.pad(x, (0, 0, steps, 0))[..., :T, :]
    if document_starts is None:
        return delayed
    document = document_starts.cumsum(-1)  # (…, T), its number
    same = F.pad(document, (steps, 0), value=-1)[..., :T] == document
    return torch.where(same[..., None], delayed, 0)


def _compress(X: Tensor, weight: Tensor | None, document_starts: Tensor | None) -> Tensor:
    """x = compress(X), (…, d)."""
    d, m = X.shape[-2:]
    if weight is None:
        if m != 1:
            expected = f"a weight of shape ({d}, {m}) or ({d}, {m}, K) for {m} value channels"
            raise ValueError(f"`compress` must be {expected}, got None")
        return X[..., 0]
    if weight.ndim not in (2, 3) or weight.shape[:2] != (d, m):
        expected = f"({d}, {m}) or ({d}, {m}, K)"
        raise ValueError(f"`compress` must have shape {expected}, got {tuple(weight.shape)}")
    w = weight.to(X.dtype)
    if w.ndim == 2:
        return (X * w).sum(-1)
    if X.ndim < 3:
        expected = "(…, time, hidden_size, value_channels)"
        raise ValueError(f"`state` must have shape {expected}, got {tuple(X.shape)}")
    x = (X * w[..., 0]).sum(-1)
    for s in range(1, w.shape[-1]):
        x = x + _delay((X * w[..., s]).sum(-1), s, document_starts)
    return x


def _value(
    z: Tensor, weight: Tensor | None, bias: Tensor | None, scale: float | None
) -> Tensor | None:
    """v = φ(W_v z + b_v), (…, m), or (…, n, m)."""
    if weight is None:
        return None
    with without_autocast(z):
        rows = weight.to(z.dtype).flatten(0, -2)  # (n·m, d)
        logit = F.linear(z, rows, None if bias is None else bias.to(z.dtype).flatten())
    logit = torch.unflatten(logit, -1, weight.shape[:-1])
    return logit if scale is None else scale * torch.sigmoid(logit)


def _gate(h: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor | None:
    """β = 2·sigmoid(w_β·h + b_β), (…,), or (…, n)."""
    if weight is None:
        return None
    logit = ((h if weight.ndim == 1 else h.unsqueeze(-2)) * weight.to(h.dtype)).sum(-1)
    return 2 * torch.sigmoid(logit if bias is None else logit + bias.to(h.dtype))
