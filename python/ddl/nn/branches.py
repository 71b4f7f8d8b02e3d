"""Branches: what a sublayer's output writes to the stream — direction, value and gate."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ddl.options import Erase, Gate, Mapping, Value, ValueFrom
from ddl.results import ReadParameters, Write

from .convolution import Slot
from .direction import AttentionDirection, FurtherDirections, LinearDirection, PooledDirection
from .gate import apply_gate, squash
from .linear import Projection, project, projection_of
from .padding import without_padding
from .pool import Pool
from .read import Read

__all__ = ["Branches"]


class Branches(nn.Module):
    """The branches of a DeltaResidual, which makes them, and the `Write` that they compute.

    In a trunk the fused read before the sublayer computes linear values and gates from the
    parameters that `added_to` gives it; `value_and_gate` computes the same without one. `write`
    does the rest. For n > 1 rewrites values are (…, n, m), gates (…, n) and directions (…, n, d);
    for H > 1 heads (…, H, m), (…, H) and (…, H, d/H), and no read computes values or gates.
    """

    value_channels: int
    rewrites: int
    heads: int
    mapping: Mapping
    eps_k: float | None
    branch_scale: float
    erase: Erase
    gate_kind: Gate
    value_kind: Value
    value_from: ValueFrom
    value_scale: float
    value_constant: float
    gate: Projection | nn.Sequential
    gate_pool: Pool | None
    value: Projection | None
    direction: LinearDirection | PooledDirection | AttentionDirection | None
    further: FurtherDirections | None

    @property
    def writes(self) -> int:
        """Number of writes of rank 1: one of each rewrite, or of each head."""
        return self.rewrites * self.heads

    @property
    def gates(self) -> int:
        """Number of gates: β of each write and, if they are gates of their own, α of each."""
        return 2 * self.writes if self.erase == "separate" else self.writes

    @property
    def reads_value(self) -> bool:
        """True if the value is computed from the read, not constant or the sublayer's output."""
        return self.mapping == "k" and self.value_kind != "constant"

    @property
    def reads_gate(self) -> bool:
        """True if the gate is linear in the read."""
        return self.gate_kind == "linear" and self.gate_pool is None

    @property
    def reads_raw(self) -> bool:
        """True if the read before is to return the raw x, because the heads' values need it."""
        return self.heads > 1 and self.reads_value and self.value_from == "compressed"

    def added_to(self, read: ReadParameters, dtype: torch.dtype | None = None) -> ReadParameters:
        """The parameters of the read before this residual, which computes value and gate, too.

        dtype: of the states, and so of a raw read; None for that of autocast or the states.
        """
        if self.reads_raw:
            return ReadParameters(read.compress, norm_eps=None, context_dtype=dtype)
        if self.heads > 1:
            return read
        gate_weight: Tensor | None = None
        gate_bias: Tensor | None = None
        value_weight: Tensor | None = None
        value_bias: Tensor | None = None
        value_scale: float | None = None
        if self.reads_gate:
            gate = projection_of("gate", self.gate)
            gate_weight = self._per_gate(gate.weight, 0)
            gate_bias = self._per_gate(gate.bias, 0)
        if self.reads_value:
            value = projection_of("value", self.value)
            value_weight = self._per_rewrite(value.weight, 0)
            value_bias = self._per_rewrite(value.bias, 0)
            value_scale = self.value_scale if self.value_kind == "sigmoid" else None
        # Not by `_replace`, which torch.compile cannot return from a part of a graph.
        return ReadParameters(
            read.compress,
            read.norm_weight,
            read.norm_eps,
            gate_weight,
            gate_bias,
            value_weight,
            value_bias,
            value_scale,
            value_from_compressed=self.reads_value and self.value_from == "compressed",
            context_dtype=read.context_dtype,
            next_erase=self.erase if self.reads_gate else "tied",
        )

    def after_read(
        self, read: nn.Module, context: Tensor, value: Tensor | None, gate: Tensor | None
    ) -> tuple[Tensor, Any, Any]:
        """The context h, value and gate, from what the read before returned; several heads compute
        theirs here.
        """
        if self.heads == 1:
            return context, value, gate
        raw = None
        if self.reads_raw:
            assert isinstance(read, Read)
            raw, context = context, read.normalise(context)
        return context, *self.value_and_gate(context, raw)

    def value_and_gate(
        self, context: Tensor, raw: Tensor | None
    ) -> tuple[Tensor | None, Tensor | None]:
        """Compute value (…, m) and gate (…,) as the fused read would; None for what it cannot.

        For n > 1 rewrites or heads, these are (…, n, m) and (…, n), here and below.
        """
        gate = projection_of("gate", self.gate) if self.reads_gate else None
        value = projection_of("value", self.value) if self.reads_value else None
        if value is None or gate is None or self.value_from == "compressed":
            z = context if raw is None or self.value_from == "context" else raw
            return (
                None if value is None else self._values(project(z, value.weight, value.bias)),
                None if gate is None else self._squashed(project(context, gate.weight, gate.bias)),
            )
        # One product with both weights reads the context once, and needs no sum of two gradients.
        weight = torch.cat((gate.weight, value.weight))
        both = project(context, weight, torch.cat((gate.bias, value.bias)))
        return self._values(both[..., self.gates :]), self._squashed(both[..., : self.gates])

    def write(
        self,
        state: Tensor,
        sublayer_out: Tensor,
        context: Tensor,
        value: Tensor | None,
        gate: Tensor | None,
        *,
        keep: Tensor | None = None,
        document_starts: Tensor | None = None,
        slot: Slot | None = None,
    ) -> Write:
        """Return what a sublayer's output writes to the state X (…, d, m).

        value, gate: from the read; None for what it does not compute. keep: (…,) bool, False for
        padding. document_starts, slot: as in `Pool`.
        """
        value, gate = self.fill_value_and_gate(state, context, value, gate, slot, document_starts)
        gate = gate if keep is None else without_padding(gate, keep)
        direction, value = self.rewrite_inputs(state, sublayer_out, context, value)
        return Write(direction, value, gate, self.eps_k, self.erase, self.heads)

    def fill_value_and_gate(
        self,
        state: Tensor,
        context: Tensor,
        value: Tensor | None,
        gate: Tensor | None,
        slot: Slot | None = None,
        document_starts: Tensor | None = None,
    ) -> tuple[Tensor | None, Tensor]:
        """Fill in what the read cannot compute: constant values, and "mlp" or pooled gates.

        state: X (…, d, m). value, gate: from the read, else None. slot, document_starts: as in
        `Pool`.
        """
        if gate is None:
            pool = self.gate_pool
            z = context if pool is None else pool(state, slot, document_starts)
            gate = self._per_gate(apply_gate(self.gate_kind, self.gate, z), -1)
        if self.value_kind == "constant":
            each = () if self.writes == 1 else (self.writes,)
            shape = (*context.shape[:-1], *each, self.value_channels)
            value = gate.new_full(shape, self.value_constant)
        return value, gate

    def rewrite_inputs(
        self, state: Tensor, sublayer_out: Tensor, context: Tensor, value: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Return the rewrite's direction k (…, d) and value v (…, m) for a sublayer's output.

        For n > 1 rewrites k is (…, n, d), for H > 1 heads (…, H, d/H).
        """
        if self.mapping == "k":
            assert value is not None  # the read computed it, or it is constant
            if self.heads > 1:
                return torch.unflatten(sublayer_out, -1, (self.heads, -1)), value
            return sublayer_out if self.further is None else self.further(sublayer_out), value
        assert self.direction is not None
        branch = projection_of("value", self.value)
        value = self._phi(project(sublayer_out, branch.weight, branch.bias))
        return self.direction(state, context), value

    def _squashed(self, logits: Tensor) -> Tensor:
        return self._per_gate(squash(logits), -1)

    def _per_gate(self, gates: Tensor, axis: int) -> Tensor:
        """Split an axis of gates into (2, n) if α are gates of their own; without n for 1."""
        if self.erase == "separate":
            return gates if self.writes == 1 else torch.unflatten(gates, axis, (2, self.writes))
        return gates.squeeze(axis) if self.writes == 1 and axis == 0 else gates

    def _values(self, linear: Tensor) -> Tensor:
        return self._per_rewrite(self._phi(linear), -1)

    def _per_rewrite(self, values: Tensor, axis: int) -> Tensor:
        """Split an axis of n·m values into (n, m), if n > 1."""
        if self.writes == 1:
            return values
        return torch.unflatten(values, axis, (self.writes, self.value_channels))

    def _phi(self, linear: Tensor) -> Tensor:
        return self.value_scale * torch.sigmoid(linear) if self.value_kind == "sigmoid" else linear
