"""Branches: what a sublayer's output writes to the stream — direction, value and gate."""

from __future__ import annotations

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

__all__ = ["Branches"]


class Branches(nn.Module):
    """The branches of a DeltaResidual, which makes them, and the `Write` that they compute.

    In a trunk the fused read before the sublayer computes linear values and gates from the
    parameters that `added_to` gives it; `value_and_gate` computes the same without one. `write`
    does the rest. For n > 1 rewrites values are (…, n, m), gates (…, n) and directions (…, n, d).
    """

    value_channels: int
    rewrites: int
    mapping: Mapping
    eps_k: float
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
    def reads_value(self) -> bool:
        """True if the value is computed from the read, not constant or the sublayer's output."""
        return self.mapping == "k" and self.value_kind != "constant"

    @property
    def reads_gate(self) -> bool:
        """True if the gate is linear in the read."""
        return self.gate_kind == "linear" and self.gate_pool is None

    def added_to(self, read: ReadParameters) -> ReadParameters:
        """The parameters of the read before this residual, which computes value and gate, too."""
        gate_weight: Tensor | None = None
        gate_bias: Tensor | None = None
        value_weight: Tensor | None = None
        value_bias: Tensor | None = None
        value_scale: float | None = None
        if self.reads_gate:
            gate = projection_of("gate", self.gate)
            gate_weight, gate_bias = gate.weight, gate.bias
            if self.rewrites == 1:
                gate_weight, gate_bias = gate_weight.squeeze(0), gate_bias.squeeze(0)
        if self.reads_value:
            value = projection_of("value", self.value)
            value_weight, value_bias = value.weight, value.bias
            if self.rewrites > 1:
                value_weight = self._per_rewrite(value_weight, 0)
                value_bias = self._per_rewrite(value_bias, 0)
            value_scale = self.value_scale if self.value_kind == "sigmoid" else None
        # Not by `_replace`, which torch.compile cannot return from a part of a graph.
        return ReadParameters(
            read.compress,
            read.norm_weight,
            gate_weight,
            gate_bias,
            value_weight,
            value_bias,
            read.norm_eps,
            value_scale,
            value_from_compressed=self.reads_value and self.value_from == "compressed",
            context_dtype=read.context_dtype,
        )

    def value_and_gate(
        self, context: Tensor, raw: Tensor | None
    ) -> tuple[Tensor | None, Tensor | None]:
        """Compute value (…, m) and gate (…,) as the fused read would; None for what it cannot.

        For n > 1 rewrites, these are (…, n, m) and (…, n), here and below.
        """
        gate = projection_of("gate", self.gate) if self.reads_gate else None
        value = projection_of("value", self.value) if self.reads_value else None
        if value is None or gate is None or self.value_from == "compressed":
            z = context if raw is None or self.value_from == "context" else raw
            return (
                None if value is None else self._values(project(z, value.weight, value.bias)),
                None if gate is None else squash(project(context, gate.weight, gate.bias)),
            )
        # One product with both weights reads the context once, and needs no sum of two gradients.
        weight = torch.cat((gate.weight, value.weight))
        both = project(context, weight, torch.cat((gate.bias, value.bias)))
        return self._values(both[..., self.rewrites :]), squash(both[..., : self.rewrites])

    def write(
        self,
        state: Tensor,
        sublayer_out: Tensor,
        context: Tensor,
        value: Tensor | None,
        gate: Tensor | None,
        keep: Tensor | None = None,
        document_starts: Tensor | None = None,
        slot: Slot | None = None,
    ) -> Write:
        """Return what a sublayer's output writes to the state X (…, d, m).

        value, gate: from the read; None for what it does not compute. keep: (…,) bool, False for
        padding. document_starts, slot: as in `Pool`.
        """
        direction = sublayer_out
        if value is None or gate is None or self.rewrites > 1:
            value, gate = self.fill_value_and_gate(
                state, context, value, gate, slot, document_starts
            )
            direction, value = self.rewrite_inputs(state, sublayer_out, context, value)
        if keep is not None:
            gate = without_padding(gate, keep)
        return Write(direction, value, gate, self.eps_k, self.erase)

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
            gate = apply_gate(self.gate_kind, self.gate, z)
        if self.value_kind == "constant":
            each = () if self.rewrites == 1 else (self.rewrites,)
            shape = (*context.shape[:-1], *each, self.value_channels)
            value = gate.new_full(shape, self.value_constant)
        return value, gate

    def rewrite_inputs(
        self, state: Tensor, sublayer_out: Tensor, context: Tensor, value: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Return the rewrite's direction k (…, d) and value v (…, m) for a sublayer's output.

        For n > 1 rewrites k is (…, n, d).
        """
        if self.mapping == "k":
            assert value is not None  # the read computed it, or it is constant
            return sublayer_out if self.further is None else self.further(sublayer_out), value
        assert self.direction is not None
        branch = projection_of("value", self.value)
        value = self._phi(project(sublayer_out, branch.weight, branch.bias))
        return self.direction(state, context), value

    def _values(self, linear: Tensor) -> Tensor:
        return self._per_rewrite(self._phi(linear), -1)

    def _per_rewrite(self, values: Tensor, axis: int) -> Tensor:
        """Split an axis of n·m values into (n, m), if n > 1."""
        if self.rewrites == 1:
            return values
        return torch.unflatten(values, axis, (self.rewrites, self.value_channels))

    def _phi(self, linear: Tensor) -> Tensor:
        return self.value_scale * torch.sigmoid(linear) if self.value_kind == "sigmoid" else linear
