"""The arguments of `ddl.functional.delta_rule`: checks; and the shapes of what it returns."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ddl._native import CHUNK_STEPS

from .checks import (
    check_documents,
    check_dtype,
    check_gate,
    check_positive,
    check_shape,
    check_stored,
    gate_dtype,
)


def steps_of(given: Any) -> int:
    """n, the steps of a token."""
    return given.beta.shape[2] if given.beta.ndim == 4 else 1


def queries_of(given: Any) -> int:
    """The queries to one state."""
    return max(1, given.q.shape[2] // given.beta.shape[-1])


def check_delta_rule(given: Any) -> None:
    """Check the arguments; `given` has them by name."""
    q, beta, g, state = given.q, given.beta, given.g, given.initial_state
    if q.ndim != 4 or 0 in q.shape[2:]:
        expected = "(batch, time, heads, key_features), the latter two from 1 on"
        raise ValueError(f"`q` must have shape {expected}, got {tuple(q.shape)}")
    check_dtype("q", q)
    B, T, queries, K = q.shape
    if beta.ndim not in (3, 4) or beta.shape[:2] != q.shape[:2] or 0 in beta.shape[2:]:
        expected = f"({B}, {T}, H) or ({B}, {T}, n, H), n and H from 1 on"
        raise ValueError(f"`beta` must have shape {expected}, got {tuple(beta.shape)}")
    H = beta.shape[-1]
    if H % queries and queries % H:
        expected = f"({B}, {T}, h, {K}) with h that divides {H} or a multiple of it"
        raise ValueError(f"`q` must have shape {expected}, got {tuple(q.shape)}")
    _check_heads("k", given.k, beta, K)
    _check_heads("v", given.v, beta, None)
    check_stored("k", given.k, q)
    check_stored("v", given.v, q)
    V = given.v.shape[-1]
    if g is not None and tuple(g.shape) not in ((B, T, H), (B, T, H, K)):
        expected = f"{(B, T, H)} or {(B, T, H, K)}"
        raise ValueError(f"`g` must have shape {expected}, got {tuple(g.shape)}")
    if state is not None:
        check_shape("initial_state", state, (B, H, K, V))
    for name, tensor in (("beta", beta), ("g", g), ("initial_state", state)):
        if tensor is not None:
            check_gate(name, tensor, q)
    check_positive("scale", given.scale, optional=True)
    check_documents(given.document_starts, (B, T), q, True, "")


def _check_heads(name: str, tensor: Tensor, beta: Tensor, features: int | None) -> None:
    """Raise ValueError unless k or v has the axes of β, heads that divide its, and features."""
    *batch, H = beta.shape
    shape = tuple(tensor.shape)
    fits = len(shape) == len(batch) + 2 and shape[:-2] == tuple(batch) and 0 not in shape[-2:]
    if not fits or H % shape[-2] or features not in (None, shape[-1]):
        axes = ", ".join(map(str, (*batch, "h", "V" if features is None else features)))
        sizes = f"h that divides {H}" + (" and V from 1 on" if features is None else "")
        raise ValueError(f"`{name}` must have shape ({axes}) with {sizes}, got {shape}")


def outputs(given: Any) -> tuple[Tensor, ...]:
    """The outputs of a forward, without data."""
    q, v = given.q, given.v
    (B, T, _, K), H, V, n = q.shape, given.beta.shape[-1], v.shape[-1], steps_of(given)
    real, tokens = gate_dtype(q), max(1, CHUNK_STEPS // n)
    y = v.new_empty((B, T, H * queries_of(given), V))
    state = q.new_empty((B, H, K, V), dtype=real)
    if not given.saves:
        absent = [q.new_empty(0, dtype=torch.uint8) for _ in range(2)]
        return (y, state, *absent)
    errors = q.new_empty((*v.shape[:-2], H, V), dtype=real)
    return y, state, errors, q.new_empty((B, H, -(-T // tokens), K, V), dtype=real)


def gradients(given: Any) -> tuple[Tensor, ...]:
    """The gradients of a backward, without data; empty for what was not given."""
    return tuple(
        given.q.new_empty(0, dtype=torch.uint8)
        if tensor is None
        else torch.empty_like(tensor, memory_format=torch.contiguous_format)
        for tensor in (given.q, given.k, given.v, given.beta, given.g, given.initial_state)
    )
