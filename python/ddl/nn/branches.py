"""Branches: what a sublayer's output writes to the stream — direction, value and gate."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from ddl.results import ReadParameters, Write

from .convolution import Slot
from .direction import FurtherDirections, make_direction
from .gate import apply_gate, make_gate, reset_gate, squash
from .hooks import Hooked
from .linear import Projection, project, projection_of, reset_
from .padding import without_padding
from .pool import Pool


class Branches(Hooked):
    """The branches of a DeltaResidual, made by its options, and the `Write` that they compute.

    In a trunk the fused read before the sublayer computes linear values and gates from the
    parameters that `added_to` gives it; `value_and_gate` computes the same without one. `write`
    does the rest. For n > 1 rewrites values are (…, n, m), gates (…, n) and directions (…, n, d).
    """

    def __init__(
        self, hidden_size: int, value_channels: int, options: dict[str, Any], **factory: Any
    ) -> None:
        super().__init__()
        self.hidden_size, self.value_channels = hidden_size, value_channels
        self.mapping, self.direction_kind = options["mapping"], options["direction"]
        self.gate_kind, self.gate_from = options["gate"], options["gate_from"]
        self.value_kind, self.value_from = options["value"], options["value_from"]
        self.value_init, self.value_scale = options["value_init"], float(options["value_scale"])
        self.value_constant = float(options["value_constant"])
        self.rewrites, self.erase = options["rewrites"], options["erase"]
        self.beta_init, self.branch_scale = options["beta_init"], float(options["branch_scale"])
        eps_k = options["eps_k"]
        self.eps_k = 0.02 * math.sqrt(hidden_size) if eps_k is None else float(eps_k)
        # The fused read computes values of the k-Map, and gates linear in the context.
        self.reads_value = self.mapping == "k" and self.value_kind != "constant"
        self.reads_gate = self.gate_kind == "linear" and self.gate_from == "context"

        size, n, pool = (hidden_size, value_channels), self.rewrites, None
        if self.gate_from != "context":
            kind: Any = "mean" if self.gate_from == "pooled" else self.gate_from
            pool = Pool(*size, kind, kernel_size=options["gate_kernel_size"], **factory)
        size_in = hidden_size if pool is None else pool.width
        self.gate = make_gate(self.gate_kind, size_in, options["gate_hidden"], n, **factory)
        self.gate_pool = pool
        self.value = self.direction = self.further = None
        if self.value_kind != "constant":
            bias = self.mapping == "k"
            self.value = Projection(hidden_size, n * value_channels, bias=bias, **factory)
        if n > 1:
            self.further = FurtherDirections(hidden_size, n, options["direction_rank"], **factory)
        if self.mapping == "v":
            hidden = options["direction_hidden"]
            self.direction = make_direction(self.direction_kind, *size, hidden, **factory)

    def reset_parameters(self) -> None:
        """Reset β to beta_init, a linear value's bias to value_init, a convolution to the identity.

        Other weights are drawn from a normal of std 0.5/√(size in).
        """
        if self.value is not None:
            reset_(self.value, self.value_init if self.value_kind == "linear" else 0.0)
        for branch in (self.direction, self.further):
            for module in () if branch is None else branch.modules():
                if isinstance(module, Projection):
                    reset_(module)
        reset_gate(self.gate, self.beta_init)
        if self.gate_pool is not None:
            self.gate_pool.reset_parameters()

    def added_to(self, read: ReadParameters) -> ReadParameters:
        """The parameters of the read before this residual, which computes value and gate, too."""
        gate: tuple[Tensor | None, Tensor | None] = (None, None)  # weight and bias
        value: tuple[Tensor | None, Tensor | None] = (None, None)
        if self.reads_gate:
            linear = projection_of("gate", self.gate)
            weight, bias = linear.weight, linear.bias
            single = self.rewrites == 1
            gate = (weight.squeeze(0), bias.squeeze(0)) if single else (weight, bias)
        if self.reads_value:
            linear = projection_of("value", self.value)
            value = weight, bias = linear.weight, linear.bias
            if self.rewrites > 1:
                each = (self.rewrites, self.value_channels)
                value = torch.unflatten(weight, 0, each), torch.unflatten(bias, 0, each)
        scale = self.value_scale if self.reads_value and self.value_kind == "sigmoid" else None
        compressed = self.reads_value and self.value_from == "compressed"
        # Not by `_replace`, which torch.compile cannot return from a part of a graph.
        norms: Any = (read.norm_eps, scale, compressed, read.context_dtype)
        return ReadParameters(read.compress, read.norm_weight, *gate, *value, *norms)

    def value_and_gate(
        self, context: Tensor, raw: Tensor | None
    ) -> tuple[Tensor | None, Tensor | None]:
        """Compute value (…, m) and gate (…,) as the fused read would; None for what it cannot."""
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
        if gate is None:  # "mlp", or of the pooled state
            pool = self.gate_pool
            z = context if pool is None else pool(state, slot, document_starts)
            gate = apply_gate(self.gate_kind, self.gate, z)
        if self.mapping == "v":
            branch, linear = self.direction, projection_of("value", self.value)
            assert branch is not None
            value = self._values(project(sublayer_out, linear.weight, linear.bias))
            direction = branch(state, context)
        elif value is None:
            each = () if self.rewrites == 1 else (self.rewrites,)
            shape = (*context.shape[:-1], *each, self.value_channels)
            value = gate.new_full(shape, self.value_constant)
        if self.rewrites > 1 and self.further is not None:  # a number is looked up faster
            direction = self.further(sublayer_out)
        if keep is not None:
            gate = without_padding(gate, keep)
        return Write(direction, value, gate, self.eps_k, self.erase)

    def _values(self, linear: Tensor) -> Tensor:
        """φ of the linear map, its n·m values split into (n, m) if n > 1."""
        if self.value_kind == "sigmoid":
            linear = self.value_scale * torch.sigmoid(linear)
        if self.rewrites == 1:
            return linear
        return torch.unflatten(linear, -1, (self.rewrites, self.value_channels))
