"""Results of the read operators, shared by the reference, the functional forms and the modules."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

__all__ = ["ReadResult", "RewriteReadResult"]


class ReadResult(NamedTuple):
    """What `read` gives to the next sublayer and to the rewrite after it.

    context: (…, d), h, in `context_dtype` (by default the state's dtype).
    value: (…, m), v, float32 (float64 for a float64 state); None without `value_weight`.
    gate: (…,), β in [0, 2], float32 (float64 for a float64 state); None without `gate_weight`.
    """

    context: Tensor
    value: Tensor | None
    gate: Tensor | None


class RewriteReadResult(NamedTuple):
    """What `rewrite_read` gives: the rewritten state, and the read of it (see ReadResult).

    state: (…, d, m), X', in the dtype of the state that came in.
    """

    state: Tensor
    context: Tensor
    value: Tensor | None
    gate: Tensor | None
