"""The gate β = 2·sigmoid(g(z)) of a rewrite: the share of the component along k̂ that is replaced.

z is the context or the pooled state; g is linear or linear–tanh–linear. Source: DDL (arXiv
2601.00417), gating branch. In the first version (eq. 2.6) its input is the pooled, convolved or
flattened state, later the context.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from ddl.options import LEAST_BETA, Gate

from .checks import require_exact_type
from .linear import Projection, project, projection_of, reset_

__all__ = ["apply_gate", "make_gate", "reset_gate", "squash"]


def make_gate(
    kind: Gate, size_in: int, hidden: int, gates: int, **factory: Any
) -> Projection | nn.Sequential:
    """Return g for z of `size_in` features: linear, or linear–tanh–linear with `hidden` units."""
    if kind == "linear":
        return Projection(size_in, gates, **factory)
    first = Projection(size_in, hidden, bias=False, **factory)
    return nn.Sequential(first, nn.Tanh(), Projection(hidden, gates, **factory))


def reset_gate(gate: nn.Module, beta_init: float) -> None:
    """Initialise g so that β = beta_init for every z: the last weight is zero.

    The logit of a gate that is quite shut or open would be infinite, so β is clamped to [2e-6,
    2 − 2e-6], as in the published code.
    """
    *hidden, last = (layer for layer in gate.modules() if isinstance(layer, Projection))
    for layer in hidden:
        reset_(layer)
    nn.init.zeros_(last.weight)
    beta = min(max(beta_init, LEAST_BETA), 2 - LEAST_BETA)
    nn.init.constant_(last.bias, math.log(beta / (2 - beta)))


def apply_gate(kind: Gate, gate: nn.Module, z: Tensor) -> Tensor:
    """Compute β (…,), or (…, n), from z (…, size_in), in float32 (float64 for float64).

    Raises TypeError if the gate was wrapped: its layers are not called.
    """
    layers = [gate] if kind == "linear" else require_exact_type("gate", gate, nn.Sequential)
    for layer in layers:
        if isinstance(layer, nn.Tanh):
            z = layer(z)
            continue
        projection = projection_of("gate", layer)
        z = project(z, projection.weight, projection.bias)
    return squash(z)


def squash(logit: Tensor) -> Tensor:
    """Map a logit (…, 1) to β = 2·sigmoid(logit), (…,); n logits (…, n) to (…, n)."""
    return 2 * torch.sigmoid(logit.squeeze(-1) if logit.shape[-1] == 1 else logit)
