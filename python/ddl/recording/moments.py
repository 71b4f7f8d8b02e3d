"""Mean, spread and extremes of numbers that come in parts, in constant memory."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["Moments"]


@dataclass(frozen=True)
class Moments:
    """Moments of n samples of c numbers each, float64, on the samples' device.

    count: n. mean, min, max: (c,). squares: sum of squared differences from the mean, (c,).
    """

    count: int
    mean: Tensor
    squares: Tensor
    min: Tensor
    max: Tensor

    @classmethod
    def of(cls, samples: Tensor) -> Moments:
        """The moments of samples (n, c), n ≥ 1."""
        wide = samples.double()
        mean = wide.mean(0)
        squares = (wide - mean).square().sum(0)
        return cls(len(wide), mean, squares, wide.amin(0), wide.amax(0))

    def join(self, other: Moments) -> Moments:
        """The moments of both sets of samples (Chan, Golub and LeVeque 1979)."""
        count = self.count + other.count
        apart, share = other.mean - self.mean, other.count / count
        return Moments(
            count,
            self.mean + apart * share,
            self.squares + other.squares + apart.square() * (self.count * share),
            torch.minimum(self.min, other.min),
            torch.maximum(self.max, other.max),
        )

    @property
    def std(self) -> Tensor:
        """Standard deviation over the samples, (c,)."""
        return (self.squares / self.count).sqrt()
