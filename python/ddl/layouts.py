"""How many queries, keys, values and states a mixer has: the models of Chen's note (2025).

It imports no torch.
"""

from __future__ import annotations

from typing import NamedTuple

from ddl.options import MixerKind


class Layout(NamedTuple):
    """Numbers of heads, for one of the mixer's heads; steps: how often a token writes."""

    queries: int = 1
    keys: int = 1
    values: int = 1
    states: int = 1
    steps: int = 1


def layout_of(kind: MixerKind, n: int) -> Layout:
    """Return the layout of a kind; n is the note's."""
    match kind:
        case "deltanet":
            return Layout()
        case "deltaproduct":
            return Layout(steps=n)
        case "multi-head":
            return Layout(queries=n, keys=n, values=n, states=n)
        case "multi-kv":
            return Layout(keys=n, values=n, states=n)
        case "multi-value":
            return Layout(values=n, states=n)
        case "multi-key":
            return Layout(keys=n, states=n)
        case "multi-query":
            return Layout(queries=n)
