"""The sizes of `ddl.functional.delta_rule`, and what it returns."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ddl._native import CHUNK_STEPS

from .checks import gate_dtype


def steps_of(args: Any) -> int:
    """n, the steps of a token."""
    return args.beta.shape[2] if args.beta.ndim == 4 else 1


def queries_of(args: Any) -> int:
    """The queries to one state."""
    return max(1, args.q.shape[2] // args.beta.shape[-1])


def outputs(args: Any) -> dict[str, Tensor | None]:
    """The outputs of a forward, without data."""
    q, v = args.q, args.v
    (B, T, _, K), H, V, n = q.shape, args.beta.shape[-1], v.shape[-1], steps_of(args)
    real, tokens = gate_dtype(q), max(1, CHUNK_STEPS // n)
    errors = states = None
    if args.saves:
        errors = q.new_empty((*v.shape[:-2], H, V), dtype=real)
        states = q.new_empty((B, H, -(-T // tokens), K, V), dtype=real)
    return {
        "y": v.new_empty((B, T, H * queries_of(args), V)),
        "final_state": q.new_empty((B, H, K, V), dtype=real),
        "errors": errors,
        "states": states,
    }
