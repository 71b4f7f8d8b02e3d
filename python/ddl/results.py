"""The records of a rewrite and of a read, and what the operators return.

Both travel whole from the modules to the dispatcher, where `ddl.ops` flattens them into the
arguments of a schema.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, get_args

from ddl.options import Erase

if TYPE_CHECKING:  # ddl.arrays does without torch
    import torch
    from torch import Tensor

__all__ = [
    "ERASE",
    "Chain",
    "DeltaRuleResult",
    "ReadParameters",
    "ReadResult",
    "RewriteReadResult",
    "Write",
]

# The gate α of X' = X + k̂ (β vᵀ − α k̂ᵀX): α = β | 0. Schemas have the place.
ERASE: tuple[str, ...] = get_args(Erase)


class Write(NamedTuple):
    """A rewrite of every token, X' = X + k̂ (β vᵀ − α k̂ᵀX), k̂ = k/√(|k|² + ε_k²); or n, in order.

    direction: k (…, d), of any norm. value: v (…, m). gate: β (…,), value and gate in float32
    (float64 for a float64 state). n rewrites have (…, n, d), (…, n, m) and (…, n). eps_k: ε_k.
    erase: one of `ERASE`.
    """

    direction: Tensor
    value: Tensor
    gate: Tensor
    eps_k: float
    erase: str = "tied"

    def scaled(self, scale: float | Tensor) -> Write:
        """The write with its gates times a number."""
        if isinstance(scale, (int, float)) and scale == 1:
            return self
        # Not by `_replace`, which torch.compile cannot return from a part of a graph.
        return Write(self.direction, self.value, scale * self.gate, *self[3:])


class ReadParameters(NamedTuple):
    """The parameters of a read, in the order of the schemas; see `ddl.functional.read`.

    value_from_compressed: whether the value is computed from the raw read x, not the context h.
    """

    compress: Tensor | None = None
    norm_weight: Tensor | None = None
    gate_weight: Tensor | None = None
    gate_bias: Tensor | None = None
    value_weight: Tensor | None = None
    value_bias: Tensor | None = None
    norm_eps: float | None = 1e-5
    value_scale: float | None = None
    value_from_compressed: bool = False
    context_dtype: torch.dtype | None = None

    def over_time(self) -> bool:
        """Whether the compression has an axis over time."""
        return self.compress is not None and self.compress.ndim == 3

    def looks_back(self) -> bool:
        """Whether it reads tokens before the one that it is for."""
        return self.compress is not None and self.over_time() and self.compress.shape[2] > 1

    def keywords(self) -> dict[str, Any]:
        """The same as arguments of `ddl.functional.read` and `ddl.reference.read`."""
        fields = self._asdict()
        compressed = fields.pop("value_from_compressed")
        return fields | {"value_from": "compressed" if compressed else "context"}


class ReadResult(NamedTuple):
    """Result of `read`: the next sublayer's input, and value and gate of the rewrite after it.

    context: h (…, d), in `context_dtype` (by default the state's dtype).
    value: v (…, m), float32 (float64 for a float64 state); None without `value_weight`.
    gate: β (…,) in [0, 2], float32 (float64 for a float64 state); None without `gate_weight`.
    For n rewrites to come, value is (…, n, m) and gate (…, n).
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


class DeltaRuleResult(NamedTuple):
    """The result of `ddl.functional.delta_rule`: queries of the state, and the last state.

    y: (B, T, H, V), or as many heads as the queries have if these are more. final_state: S
    (B, H, K, V), float32 (float64 for float64 inputs).
    """

    y: Tensor
    final_state: Tensor


class Chain(NamedTuple):
    """The rewrites since the last state that is stored, from which a backward computes the others.

    Every N-th state is stored, the anchor. A backward applies the rewrites since then to it again,
    with the bits of the forward, so gradients are the same. Start with
    `Chain(anchor_every=N)`; each call of `functional.rewrite_read_chained` returns the next one.

    anchor_every: N. anchor: X (…, d, m); None if the next state is stored. tensors: direction,
    value, gate and statistics of each rewrite since, in order. erase: what they erase.
    """

    anchor_every: int
    anchor: Tensor | None = None
    tensors: tuple[Tensor, ...] = ()
    erase: str = "tied"

    def before(self, write: Write) -> Chain:
        """The chain for this rewrite: empty if directions change their dtype or number, or if it
        erases otherwise than the others.
        """
        if self.tensors:
            first, direction = self.tensors[0], write.direction
            known = (first.dtype, first.shape, self.erase)
            if known != (direction.dtype, direction.shape, write.erase):
                return Chain(self.anchor_every)
        return self

    def after(self, state: Tensor, write: Write, stats: Tensor) -> Chain:
        """The chain after a rewrite of `state`, for which its operator saved `stats`."""
        tensors = (*self.tensors, write.direction, write.value, write.gate, stats)
        if len(tensors) == 4 * self.anchor_every:
            return Chain(self.anchor_every)
        # Detached, since compiled autograd would add the None that is an anchor's gradient.
        anchor = state.detach() if self.anchor is None else self.anchor
        return Chain(self.anchor_every, anchor, tensors, write.erase)
