"""Flops: floating-point operations per token, which add up and can be multiplied."""

from __future__ import annotations

from dataclasses import dataclass, fields

__all__ = ["NOTHING", "Flops", "elementwise", "product"]


@dataclass(frozen=True)
class Flops:
    """Floating-point operations per token. A multiply–add counts 2, in products of matrices and
    elsewhere; a function of one number (exp, tanh, sigmoid, a root, a quotient) counts 1.

    forward, backward: of all work, in the plain PyTorch form (`ddl.reference` for the stream).
    matrix_forward, matrix_backward: the part of these in products of matrices.
    recomputed: what the fused backward computes again instead of storing it; in no total.
    """

    forward: float = 0.0
    backward: float = 0.0
    matrix_forward: float = 0.0
    matrix_backward: float = 0.0
    recomputed: float = 0.0

    @property
    def total(self) -> float:
        """Forward and backward, without what is recomputed."""
        return self.forward + self.backward

    @property
    def matrix(self) -> float:
        """The part of `total` in products of matrices."""
        return self.matrix_forward + self.matrix_backward

    def __add__(self, other: Flops) -> Flops:
        names = [field.name for field in fields(self)]
        return Flops(*(getattr(self, name) + getattr(other, name) for name in names))

    def __mul__(self, times: float) -> Flops:
        return Flops(*(getattr(self, field.name) * times for field in fields(self)))

    __rmul__ = __mul__


NOTHING = Flops()


def product(multiply_adds: float) -> Flops:
    """A product of matrices with this many multiply–adds per token, and the gradients of both."""
    return Flops(2 * multiply_adds, 4 * multiply_adds, 2 * multiply_adds, 4 * multiply_adds)


def elementwise(forward: float, backward: float) -> Flops:
    """Work outside products of matrices: elementwise operations, sums and means."""
    return Flops(forward, backward)
