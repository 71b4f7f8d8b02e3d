"""Products, sums and triangular systems over pairs of rows, of which some may not see each other.

`pairs` (…, I, J) is True if row i sees row j. A matrix product with zeros in the other places would
let one row spoil all, because 0·NaN is NaN. Here a number that is not finite makes NaN of the rows
that see its own and, in a backward, of the gradients of those that its own sees. All others keep
every bit.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

__all__ = ["products", "solve", "sums"]

Gradients = tuple[Tensor | None, ...]


def products(a: Tensor, b: Tensor, pairs: Tensor) -> Tensor:
    """a_i·b_j of all pairs, else 0, (…, I, J) for a (…, I, K) and b (…, J, K)."""
    result: Tensor = _Products.apply(a, b, pairs)
    return result


def sums(weights: Tensor, rows: Tensor, pairs: Tensor) -> Tensor:
    """Σ_j c_ij w_j, (…, I, V), for w (…, J, V) and c (…, I, J), 0 outside of the pairs."""
    result: Tensor = _Sums.apply(weights, rows, pairs)
    return result


def solve(system: Tensor, known: Tensor, pairs: Tensor) -> Tensor:
    """x (…, C, V) with x_i + Σ_j L_ij x_j = known_i, for L (…, C, C), 0 outside of the pairs.

    All pairs have j < i. If row i sees j, and j sees another one, so does i.
    """
    x: Tensor = _Solve.apply(system, known, pairs, False)
    return x


class _Products(torch.autograd.Function):
    @staticmethod
    def forward(a: Tensor, b: Tensor, pairs: Tensor) -> Tensor:
        return (a @ b.mT).where(pairs, 0)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Gradients:
        a, b, pairs = ctx.saved_tensors
        grad = grad.where(pairs, 0)
        return sums(grad, b, pairs), sums(grad.mT, a, pairs.mT), None


class _Sums(torch.autograd.Function):
    @staticmethod
    def forward(weights: Tensor, rows: Tensor, pairs: Tensor) -> Tensor:
        reached = _seen(_spoiled(rows), pairs)
        return (weights @ _finite(rows)).masked_fill(reached, torch.nan)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Gradients:
        weights, rows, pairs = ctx.saved_tensors
        return products(grad, rows, pairs), sums(weights.mT, grad, pairs.mT), None


class _Solve(torch.autograd.Function):
    """upper: the pairs have j > i."""

    @staticmethod
    def forward(system: Tensor, known: Tensor, pairs: Tensor, upper: bool) -> Tensor:
        spoiled = _spoiled(known) | _spoiled(system)
        x = torch.linalg.solve_triangular(
            _finite(system), _finite(known), upper=upper, unitriangular=True
        )
        return x.masked_fill(spoiled | _seen(spoiled, pairs), torch.nan)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        system, _, pairs, ctx.upper = inputs
        ctx.save_for_backward(system, pairs, output)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Gradients:
        system, pairs, x = ctx.saved_tensors
        known: Tensor = _Solve.apply(system.mT, grad, pairs.mT, not ctx.upper)
        return -products(known, x, pairs), known, None, None


def _spoiled(rows: Tensor) -> Tensor:
    """Which rows have a number that is not finite, (…, J, 1)."""
    return ~rows.abs().amax(-1, keepdim=True).isfinite()  # amax is NaN if one number is


def _finite(rows: Tensor) -> Tensor:
    """The rows, with 0 in place of NaN and infinity."""
    return rows.nan_to_num(0.0, 0.0, 0.0)


def _seen(spoiled: Tensor, pairs: Tensor) -> Tensor:
    """Which rows see a spoiled one, (…, I, 1)."""
    return (pairs.float() @ spoiled.float()) > 0
