"""Results of the read operators, shared by `ddl.reference`, `ddl.functional` and the modules."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

__all__ = ["ReadResult", "RewriteReadResult"]


class ReadResult(NamedTuple):
    """Result of `read`: the next sublayer's input, and value and gate of the rewrite after it.

    context: h (…, d), in `context_dtype` (by default the state's dtype).
    value: v (…, m), float32 (float64 for a float64 state); None without `value_weight`.
    gate: β (…,) in [0, 2], float32 (float64 for a float64 state); None without `gate_weight`.
    """

    context: Tensor
    value: Tensor | None
    gate: Tensor | None


class RewriteReadResult(NamedTuple):
    """Result of `rewrite_read`: the rewritten state and its read (see ReadResult).

    state: X' (…, d, m), in the input state's dtype.
    """

    state: Tensor
    context: Tensor
    value: Tensor | None
    gate: Tensor | None
