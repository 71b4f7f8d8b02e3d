"""Padding: tokens that no other one may see."""

from __future__ import annotations

from torch import Tensor


def without_padding(x: Tensor, keep: Tensor) -> Tensor:
    """x (…,) or with further axes, and zeros where `keep` (…,) is False, even in place of NaN."""
    return x.where(keep[(..., *[None] * (x.ndim - keep.ndim))], 0)
