"""Directions and gates estimated from the state, written out as formulas in plain PyTorch."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import Tensor

from ddl import DeltaResidual, reference
from tests.support.helpers import normal, randomise_

F64 = torch.float64
B, T, D = 2, 6, 5
HIDDEN, TAPS = 3, 3
NORM_EPS = 1e-5

DIRECTIONS: list[dict[str, Any]] = [
    {"mapping": "v"},
    *(
        {"mapping": "v", "direction": direction, "direction_hidden": HIDDEN}
        for direction in ("mean", "flatten", "attention")
    ),
]
GATES: list[dict[str, Any]] = [
    {**kind, **source}
    for kind, source in itertools.product(
        ({}, {"gate": "mlp", "gate_hidden": 4}),
        ({"gate_from": "pooled"}, {"gate_from": "convolved", "gate_kernel_size": TAPS}),
    )
]
GATES += [{**kind, "gate_from": "flatten"} for kind in ({}, {"gate": "mlp", "gate_hidden": 4})]
BRANCHES: list[dict[str, Any]] = [
    *DIRECTIONS[1:],
    *GATES,
    *({"value": value, **GATES[0]} for value in ("sigmoid", "constant")),
    {"value_from": "compressed", **GATES[1]},
    {"value": "sigmoid", **DIRECTIONS[3], **GATES[3]},
]


def name_of(options: dict[str, Any]) -> str:
    return "-".join(str(value) for value in options.values() if not isinstance(value, int))


def make(m: int, dtype: torch.dtype = F64, **options: Any) -> DeltaResidual:
    module = DeltaResidual(D, m, **options).to(dtype)
    randomise_(module, std=0.8)
    return module


def make_inputs(m: int, dtype: torch.dtype = F64) -> dict[str, Tensor]:
    inputs = {
        # Far from unit size, as states are, so a missing normalisation shows.
        "x": 3 * normal(*((B, T, D) if m == 1 else (B, T, D, m)), seed=1),
        "sublayer_out": normal(B, T, D, seed=2),
        "context": normal(B, T, D, seed=3),
        "compressed": normal(B, T, D, seed=4),
    }
    return {name: x.to(dtype).requires_grad_() for name, x in inputs.items()}


def normalised(x: Tensor) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + NORM_EPS).sqrt()


def direction_by_hand(p: DeltaResidual, X: Tensor, h: Tensor, direction: str) -> Tensor:
    """k (…, d) from the state X (…, d, m) and the context h (…, d)."""
    branch, m = p.direction, X.shape[-1]
    if direction == "linear":
        return h @ branch.weight.mT
    columns = [normalised(X[..., j]) for j in range(m)]
    if direction == "attention":
        q = h @ branch.query.weight.mT
        scores = [(q * (x @ branch.key.weight.mT)).sum(-1) / HIDDEN**0.5 for x in columns]
        weights = [s.exp() / sum(t.exp() for t in scores) for s in scores]
        mixed = sum(w[..., None] * x for w, x in zip(weights, columns, strict=True))
        return mixed @ branch.out.weight.mT
    w = branch.hidden.weight  # (hidden, d), or (hidden, d·m) with the channels innermost
    if direction == "mean":
        hidden = normalised(sum(X[..., j] for j in range(m)) / m) @ w.mT
    else:
        rms = (X.square().mean((-2, -1)) + NORM_EPS).sqrt()
        hidden = sum(X[..., j] @ w[:, j::m].mT for j in range(m)) / rms[..., None]
    return torch.tanh(hidden) @ branch.out.weight.mT


def gate_by_hand(
    p: DeltaResidual, X: Tensor, h: Tensor, gate: str = "linear", gate_from: str = "context"
) -> Tensor:
    """β (…,) from the state X (B, T, d, m) and the context h (B, T, d)."""
    z = h
    if gate_from == "flatten":
        z = normalised(
            torch.stack([X[..., i, j] for i in range(D) for j in range(X.shape[-1])], -1)
        )
    elif gate_from != "context":
        mean = X.sum(-1) / X.shape[-1]
        if gate_from == "convolved":
            w = p.gate_pool.weight
            convolved = []
            for t in range(X.shape[1]):
                convolved.append(sum(w[:, s] * mean[:, t - s] for s in range(min(TAPS, t + 1))))
            mean = torch.stack(convolved, dim=1)
        z = normalised(mean)
    if gate == "mlp":
        z, last = torch.tanh(z @ p.gate[0].weight.mT), p.gate[2]
    else:
        last = p.gate
    return 2 / (1 + torch.exp(-(z @ last.weight[0] + last.bias)))


def by_hand(
    p: DeltaResidual,
    x: Tensor,
    sublayer_out: Tensor,
    context: Tensor,
    compressed: Tensor,
    *,
    mapping: str = "k",
    direction: str = "linear",
    gate: str = "linear",
    gate_from: str = "context",
    value: str = "linear",
    value_from: str = "context",
    **sizes: int,
) -> Tensor:
    """The residual from its parameters, with the rewrite of `ddl.reference`."""
    X = x[..., None] if p.value_channels == 1 else x
    if mapping == "v":
        k, v = direction_by_hand(p, X, context, direction), sublayer_out @ p.value.weight.mT
    elif value == "constant":
        k, v = sublayer_out, torch.full((B, T, p.value_channels), 2.0, dtype=x.dtype)
    else:
        z = compressed if value_from == "compressed" else context
        k, v = sublayer_out, z @ p.value.weight.mT + p.value.bias
    if value == "sigmoid":
        v = 4 / (1 + torch.exp(-v))
    beta = gate_by_hand(p, X, context, gate, gate_from)
    return reference.rewrite(X, k, v, beta, eps_k=0.02 * D**0.5).view_as(x)
