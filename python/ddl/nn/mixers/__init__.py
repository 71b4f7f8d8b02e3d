"""Sublayers that mix tokens by the delta rule over time."""

from .mixer import DeltaMixer

__all__ = ["DeltaMixer"]
