"""The quantities that `ddl.record` computes from a rewrite X' = X + k̂ (β vᵀ − α k̂ᵀX).

A sublayer of a stream without rewrites adds F bᵀ to n streams, X' = X M + F bᵀ, or F to one.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ddl.nn.additions import Addition
from ddl.nn.hooks import Rewrite

__all__ = [
    "ADDED",
    "BINS",
    "BOUNDS",
    "KEPT",
    "PER_CHANNEL",
    "QUANTITIES",
    "REGIMES",
    "bins",
    "measure",
    "measure_addition",
]

# One number per token, except those of PER_CHANNEL, which have one per value channel.
QUANTITIES = {
    "beta": "gate β, 0 to 2",
    "k_norm": "|k|, the norm of the direction before it is normalised",
    "eigenvalue": "λ = 1 − sα|k̂|², by which the stream along k̂ is scaled; s is `branch_scale`, and"
    " α is β, or 0 with `erase` none",
    "readout": "p = k̂ᵀX, what the stream holds along k̂",
    "value": "v, what β = 1 would replace the readout by",
    "error": "|v − p|, the discrepancy",
    "error_after": "|v − k̂ᵀX'|, the discrepancy after the rewrite",
    "shrinks": "1 if the rewrite makes the discrepancy smaller, else 0",
    "write_norm": "|s k̂ (β v − α p)ᵀ|, the norm of what is written; s is `branch_scale`",
    "state_norm": "|X|, Frobenius, before the rewrite",
    "state_norm_after": "|X'|, Frobenius, after the rewrite",
    "channel_norm": "norm of each value channel before the rewrite",
    "channel_norm_after": "norm of each value channel after the rewrite",
    "coherence": "cosine of k̂ with that of the sublayer before",
}
PER_CHANNEL = ("readout", "value", "channel_norm", "channel_norm_after")

# Those of a stream without rewrites. Its channels are its n streams, or the sums of attention
# residuals.
ADDED = {
    "write_norm": "|F bᵀ|, the norm of what the sublayer adds",
    "state_norm": "|X|, Frobenius, before the sublayer",
    "state_norm_after": "|X'|, Frobenius, after the sublayer",
    "channel_norm": "norm of each stream before the sublayer",
    "channel_norm_after": "norm of each stream after the sublayer",
    "coherence": "cosine of F with that of the sublayer before",
}

# Vectors and states, which can be kept for every token but have no statistics.
KEPT = {
    "direction": "k̂ (d,); F/|F| in a stream without rewrites",
    "state": "X (d, m), before the rewrite or the addition",
    "state_after": "X' (d, m), after it",
}

# Regimes of a rewrite by its eigenvalue λ: name → (lower, upper). A bound between two belongs to
# the one nearer to 0. α = 0 keeps (λ = 1), α = 1 projects (λ ≈ 0), α = 2 reflects (λ ≈ −1).
RANGES: dict[str, tuple[float, float]] = {
    "near-identity": (0.9, math.inf),
    "interpolating": (0.1, 0.9),
    "near-projection": (-0.1, 0.1),
    "near-reflection": (-0.9, -0.1),
    "reflection": (-math.inf, -0.9),
}
# The bounds of the histogram, whose outermost bins hold the eigenvalues outside [−1, 1], too.
REGIMES = {name: (max(lower, -1.0), min(upper, 1.0)) for name, (lower, upper) in RANGES.items()}
BOUNDS = tuple(sorted({upper for _, upper in REGIMES.values()} - {1.0}))  # between two regimes
TINY = 1e-30  # below every norm of a sublayer that writes
BINS = 40  # of the histogram of eigenvalues over [−1, 1]; every bound above is an edge of one


def measure(rewrite: Rewrite, before: Tensor | None) -> dict[str, Tensor]:
    """Compute all quantities of a rewrite, and what KEPT names, per token.

    before: k̂ (…, d) of the sublayer before; None if there is none.

    Returns float32 tensors (float64 for a float64 state) of shape (…,), (…, m) for PER_CHANNEL,
    and the vectors and states of KEPT.
    """
    dtype = rewrite.gate.dtype
    x, k, v = (t.to(dtype) for t in (rewrite.state, rewrite.direction, rewrite.value))
    beta, alpha, scale = rewrite.gate, rewrite.alpha, rewrite.scale
    direction = rewrite.unit_direction()
    readout = (direction.unsqueeze(-1) * x).sum(-2)
    squared = direction.square().sum(-1)
    discrepancy = v - readout
    written = scale * beta.unsqueeze(-1) * (discrepancy if rewrite.erase == "tied" else v)
    error = torch.linalg.vector_norm(discrepancy, dim=-1)
    error_after = torch.linalg.vector_norm(discrepancy - squared.unsqueeze(-1) * written, dim=-1)
    after = rewrite.after().to(dtype)
    channel_norm, channel_norm_after = (torch.linalg.vector_norm(s, dim=-2) for s in (x, after))
    measured = {
        "beta": beta,
        "k_norm": torch.linalg.vector_norm(k, dim=-1),
        "eigenvalue": 1 - scale * alpha * squared,
        "readout": readout,
        "value": v,
        "error": error,
        "error_after": error_after,
        "shrinks": (error_after < error).to(dtype),
        "write_norm": squared.sqrt() * torch.linalg.vector_norm(written, dim=-1),
        "state_norm": torch.linalg.vector_norm(channel_norm, dim=-1),
        "state_norm_after": torch.linalg.vector_norm(channel_norm_after, dim=-1),
        "channel_norm": channel_norm,
        "channel_norm_after": channel_norm_after,
        "direction": direction,
        "state": x,
        "state_after": after,
    }
    if before is not None:
        measured["coherence"] = torch.cosine_similarity(direction, before.to(dtype), dim=-1)
    return measured


def measure_addition(addition: Addition, before: Tensor | None) -> dict[str, Tensor]:
    """Compute the quantities of ADDED, and what KEPT names, per token; as `measure`."""
    dtype = torch.float64 if addition.state.dtype == torch.float64 else torch.float32
    x, written, after = (t.to(dtype) for t in (addition.state, addition.written, addition.after()))
    norm = torch.linalg.vector_norm(written, dim=-1)
    channel_norm, channel_norm_after = (torch.linalg.vector_norm(s, dim=-2) for s in (x, after))
    measured = {
        "write_norm": norm * torch.linalg.vector_norm(addition.weights().to(dtype), dim=-1),
        "state_norm": torch.linalg.vector_norm(channel_norm, dim=-1),
        "state_norm_after": torch.linalg.vector_norm(channel_norm_after, dim=-1),
        "channel_norm": channel_norm,
        "channel_norm_after": channel_norm_after,
        "direction": torch.nn.functional.normalize(written, dim=-1, eps=TINY),
        "state": x,
        "state_after": after,
    }
    if before is not None:
        measured["coherence"] = torch.cosine_similarity(written, before.to(dtype), dim=-1)
    return measured


def bins(eigenvalues: Tensor) -> Tensor:
    """Count eigenvalues (…,) in BINS equal bins over [−1, 1] → (BINS,) int64.

    A value on an edge counts in the bin nearer to 0, as in REGIMES. One outside [−1, 1], where
    `branch_scale` outside [0, 1] can bring it, counts in the outermost bin; NaN counts in none.
    """
    values, half = eigenvalues.flatten().double(), BINS // 2
    values = values[~values.isnan()]
    edges = torch.arange(1, half, device=values.device).double() / half
    at = torch.bucketize(values.abs(), edges)
    return torch.bincount(torch.where(values < 0, half - 1 - at, half + at), minlength=BINS)
