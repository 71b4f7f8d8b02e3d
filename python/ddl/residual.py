"""DeltaResidual: the drop-in for one residual addition."""

from __future__ import annotations

import math
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from . import functional
from ._checks import check_features, check_stream, unwrapped
from ._options import (
    LEAST_EPS_K,
    check_between,
    check_choice,
    check_counts,
    check_finite,
    check_positive,
    check_used,
)
from .projection import Projection, project, taken

__all__ = ["DeltaResidual"]

Mapping = Literal["k", "v"]
Gate = Literal["linear", "mlp"]
Value = Literal["linear", "sigmoid", "constant"]
ValueFrom = Literal["context", "compressed"]


class DeltaResidual(nn.Module):
    """X' = X + β k̂ (v − k̂ᵀX)ᵀ in place of x + F(x): read along k̂, compare with v, write.

    Shapes: with one value channel the state x is (…, d), like any residual stream; with m > 1 it
    is (…, d, m). The sublayer's output and the context are (…, d).

        h = norm(x);  x = residual(x, F(h), context=h)

    k-Map (default): the direction k is F(h), the value v = φ(W_v z + b_v). v-Map: v = φ(W_v F(h))
    and k = W_k h. Gate: β = 2·sigmoid(g(h)) with g linear, or linear–tanh–linear ("mlp"). Values
    and gates are computed in float32 whatever the storage type.

    Zero-initialised output projections. F(h) = 0 means k = 0: nothing is written (k̂ = 0), and the
    gradient reaches the projection multiplied by 1/√(|k|² + ε_k²) = 1/ε_k. With ε_k = 1e-5 that is
    100,000: one such step drowns every other gradient under a clipped global norm and lingers in
    Adam's second moment. It is the true slope of the function, but only within 1e-5 of zero, a
    distance no optimiser step respects. So ε_k is 0.02·√d by default: k̂ fades out where the root
    mean square of k falls below 0.02. The gradient at k = 0 is then some ten times that of a small
    random projection, in every dtype; gradients stay exact derivatives everywhere; and |k̂|² is 0.96
    at a root mean square of 0.1, 0.996 at 0.3.

    `gate` and `value` hold weights that are taken without calling them: forward hooks on them do
    not fire, and a wrapper in their place is refused. torch.nn.utils.parametrize and prune work.

    Args:
        hidden_size: d.
        value_channels: m.
        mapping: "k", the sublayer gives the direction and the read the value; "v", the sublayer
            gives the value and the context the direction.
        gate: "linear", or "mlp" with a hidden layer.
        gate_hidden: hidden units of an "mlp" gate.
        value: φ — "linear", "sigmoid" (value_scale·sigmoid), or "constant" (v = value_constant,
            k-Map only).
        value_init: b_v of a linear value at initialisation (k-Map only). A value that starts around
            zero has a random sign in every token, so a sublayer would first have to learn which way
            its output is written (measured: benchmarks/LOG.md).
        value_scale: scale of a "sigmoid" value.
        value_constant: the "constant" value.
        value_from: z of the k-Map — "context", the normalised read h, or "compressed", the raw read
            x, which `forward` then asks for.
        beta_init: β at initialisation, in (0, 2); the gate's weight starts at zero.
        eps_k: ε_k in units of |k|; None for 0.02·√d. The papers' checkpoints want 1e-5.
        device, dtype: of the parameters.

    Raises:
        ValueError: an option that is unknown, out of range, or, where it has no effect, set to
            other than its default.

    Source: DDL (arXiv 2601.00417), eq. 2.5 and Appendix B.
    """

    def __init__(
        self,
        hidden_size: int,
        value_channels: int = 1,
        *,
        mapping: Mapping = "k",
        gate: Gate = "linear",
        gate_hidden: int = 128,
        value: Value = "linear",
        value_init: float = 1.0,
        value_scale: float = 4.0,
        value_constant: float = 2.0,
        value_from: ValueFrom = "context",
        beta_init: float = 1.0,
        eps_k: float | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_counts(
            hidden_size=hidden_size, value_channels=value_channels, gate_hidden=gate_hidden
        )
        check_choice("mapping", mapping, get_args(Mapping))
        check_choice("gate", gate, get_args(Gate))
        check_choice("value", value, get_args(Value))
        check_choice("value_from", value_from, get_args(ValueFrom))
        check_positive("value_scale", value_scale)
        check_finite("value_init", value_init)
        check_finite("value_constant", value_constant)
        check_between("beta_init", beta_init, 0, 2)
        check_positive("eps_k", eps_k, optional=True, least=LEAST_EPS_K)
        if mapping == "v" and value == "constant":
            raise ValueError(
                '`value` must be "linear" or "sigmoid" with mapping="v", got "constant"'
            )
        linear, constant = value == "linear" and mapping == "k", value == "constant"
        read = mapping == "k" and not constant
        check_used(
            gate_hidden=(gate_hidden, 128, gate == "mlp", 'gate="mlp"'),
            value_init=(value_init, 1.0, linear, 'value="linear" and mapping="k"'),
            value_scale=(value_scale, 4.0, value == "sigmoid", 'value="sigmoid"'),
            value_constant=(value_constant, 2.0, constant, 'value="constant"'),
            value_from=(value_from, "context", read, 'mapping="k" and not value="constant"'),
        )
        self.hidden_size, self.value_channels = hidden_size, value_channels
        self.mapping, self.gate_kind = mapping, gate
        self.value_kind, self.value_from = value, value_from
        self.value_init = value_init
        self.value_scale, self.value_constant = value_scale, value_constant
        self.beta_init = beta_init
        self.eps_k = 0.02 * math.sqrt(hidden_size) if eps_k is None else eps_k

        self._make_layers(gate, gate_hidden, device=device, dtype=dtype)
        self.reset_parameters()

    def _make_layers(self, gate: Gate, gate_hidden: int, **factory: Any) -> None:
        d = self.hidden_size
        self.gate: Projection | nn.Sequential
        if gate == "linear":
            self.gate = Projection(d, 1, **factory)
        else:
            hidden = Projection(d, gate_hidden, bias=False, **factory)
            self.gate = nn.Sequential(hidden, nn.Tanh(), Projection(gate_hidden, 1, **factory))
        self.value = self.direction = None
        if self.value_kind != "constant":
            self.value = Projection(d, self.value_channels, bias=self.mapping == "k", **factory)
        if self.mapping == "v":
            self.direction = Projection(d, d, bias=False, **factory)

    def reset_parameters(self) -> None:
        """β = beta_init everywhere, v around value_init; other weights normal, std 0.5/√d."""
        std = 0.5 / math.sqrt(self.hidden_size)
        for linear in (self.value, self.direction):
            if linear is not None:
                nn.init.normal_(linear.weight, std=std)
                if linear.bias is not None:
                    start = self.value_init if self.value_kind == "linear" else 0.0
                    nn.init.constant_(linear.bias, start)
        *hidden, last = (layer for layer in self.gate.modules() if isinstance(layer, Projection))
        for linear in hidden:
            nn.init.normal_(linear.weight, std=std)
        nn.init.zeros_(last.weight)
        nn.init.constant_(last.bias, math.log(self.beta_init / (2 - self.beta_init)))

    def forward(
        self, x: Tensor, sublayer_out: Tensor, *, context: Tensor, compressed: Tensor | None = None
    ) -> Tensor:
        """Rewrites the state with a sublayer's output.

        Args:
            x: the state, (…, d) for one value channel, (…, d, m) otherwise.
            sublayer_out: F(h), (…, d).
            context: h, what the sublayer read, (…, d).
            compressed: the raw read x (…, d), what the context is the norm of. Needed with
                value_from="compressed", and used then alone. `read(X, return_compressed=True)` of
                a `Read` returns it; where h = norm(x) without a `Read`, it is the state x.

        Returns:
            The rewritten state, in the shape and dtype of x.

        Raises:
            ValueError: a shape or device that does not fit, no `compressed` where it is needed.
            TypeError: a dtype, no tensor, a `gate` or `value` that was wrapped.
        """
        self._check(x, sublayer_out, context, compressed)
        value, gate = self.value_and_gate(context, compressed)
        direction, value = self.write(sublayer_out, context, value)
        x = x.unsqueeze(-1) if self.value_channels == 1 else x
        x = functional.rewrite(x, direction, value, gate, eps_k=self.eps_k)
        return x.squeeze(-1) if self.value_channels == 1 else x

    # --- the same in pieces, for DeltaStream, where the read computes what is linear in x ---------

    def fused(self) -> dict[str, Any]:
        """Arguments with which `ddl.functional.read` computes value and gate itself."""
        arguments: dict[str, Any] = {}
        if self.gate_kind == "linear":
            gate = taken("gate", self.gate)
            arguments["gate_weight"] = gate.weight.squeeze(0)
            arguments["gate_bias"] = gate.bias.squeeze(0)
        if self._value_is_read:
            value = taken("value", self.value)
            arguments["value_weight"], arguments["value_bias"] = value.weight, value.bias
            arguments["value_from"] = self.value_from
            if self.value_kind == "sigmoid":
                arguments["value_scale"] = self.value_scale
        return arguments

    def value_and_gate(self, context: Tensor, raw: Tensor | None) -> tuple[Tensor | None, Tensor]:
        """(value, gate) where the read computed neither; the value is None for mapping="v"."""
        return self.complete(context, *self._linear(context, raw))

    def complete(
        self, context: Tensor, value: Tensor | None, gate: Tensor | None
    ) -> tuple[Tensor | None, Tensor]:
        """Adds what a read cannot compute: a two-layer gate, a constant value."""
        if gate is None:
            gate = self._mlp_gate(context)
        if self.value_kind == "constant":
            value = gate.new_full((*gate.shape, self.value_channels), self.value_constant)
        return value, gate

    def write(
        self, sublayer_out: Tensor, context: Tensor, value: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """(direction, value) of the rewrite, from the sublayer's output."""
        if self.mapping == "k":
            assert value is not None  # from the read, or constant
            return sublayer_out, value
        assert self.direction is not None
        return self.direction(context), self._phi(_applied("value", self.value, sublayer_out))

    def _check(
        self, x: Tensor, sublayer_out: Tensor, context: Tensor, compressed: Tensor | None
    ) -> None:
        """Names the caller's arguments, where the operator would speak of state and direction."""
        d, m = self.hidden_size, self.value_channels
        check_stream("x", x, (d,) if m == 1 else (d, m))
        shape = (*x.shape[: -1 if m == 1 else -2], d)
        check_features("sublayer_out", sublayer_out, shape, x)
        check_features("context", context, shape, x)
        if compressed is not None:
            check_features("compressed", compressed, shape, x)
        elif self.value_from == "compressed":
            raise ValueError(
                f"`compressed` must be the raw read, of shape {tuple(shape)}, with "
                'value_from="compressed", got None: `read(x, return_compressed=True)` returns it, '
                "and where the context is the norm of x itself it is x"
            )

    @property
    def _value_is_read(self) -> bool:
        """Whether the value is computed from what was read (else constant, or the sublayer's)."""
        return self.mapping == "k" and self.value_kind != "constant"

    def _linear(self, context: Tensor, raw: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
        """(value, gate) where they are linear, as the read computes them; else None."""
        gate = taken("gate", self.gate) if self.gate_kind == "linear" else None
        value = taken("value", self.value) if self._value_is_read else None
        if value is None or gate is None or self.value_from == "compressed":
            z = context if raw is None or self.value_from == "context" else raw
            return (
                None if value is None else self._phi(project(z, value.weight, value.bias)),
                None if gate is None else _gate(project(context, gate.weight, gate.bias)),
            )
        # One product with both weights reads the context once, and its gradient needs no addition.
        weight = torch.cat((gate.weight, value.weight))
        both = project(context, weight, torch.cat((gate.bias, value.bias)))
        return self._phi(both[..., 1:]), _gate(both[..., :1])

    def _mlp_gate(self, h: Tensor) -> Tensor:
        for layer in unwrapped("gate", self.gate, nn.Sequential):
            h = _applied("gate", layer, h) if isinstance(layer, Projection) else layer(h)
        return _gate(h)

    def _phi(self, linear: Tensor) -> Tensor:
        return self.value_scale * torch.sigmoid(linear) if self.value_kind == "sigmoid" else linear

    def extra_repr(self) -> str:
        return (
            f"hidden_size={self.hidden_size}, value_channels={self.value_channels}, "
            f"mapping={self.mapping!r}, value={self.value_kind!r}, value_from={self.value_from!r}, "
            f"beta_init={self.beta_init:g}, eps_k={self.eps_k:.3g}"
        )


def _gate(logit: Tensor) -> Tensor:
    return 2 * torch.sigmoid(logit.squeeze(-1))


def _applied(name: str, module: Any, x: Tensor) -> Tensor:
    layer = taken(name, module)
    return project(x, layer.weight, layer.bias)
