"""Directions and gates from the state: their formulas, and their initialisation."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from ddl import DeltaResidual
from tests.support.branch_cases import (
    BRANCHES,
    DIRECTIONS,
    F64,
    GATES,
    B,
    D,
    T,
    by_hand,
    make,
    make_inputs,
    name_of,
)
from tests.support.helpers import assert_same_gradients, gradients, normal
from tests.support.tolerances import assert_close

F32 = torch.float32
branches = pytest.mark.parametrize("options", BRANCHES, ids=name_of)
SCALAR = [options for options in BRANCHES if options.get("direction") != "attention"]
directions = pytest.mark.parametrize("options", DIRECTIONS[1:], ids=name_of)


# --- the formulas --------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [F64, F32], ids=str)
@pytest.mark.parametrize(
    ("m", "options"),
    [(m, options) for m, listed in ((1, SCALAR), (3, BRANCHES)) for options in listed],
    ids=lambda value: name_of(value) if isinstance(value, dict) else str(value),
)
def test_every_branch_and_gradient(options: dict[str, Any], m: int, dtype: torch.dtype) -> None:
    exact, module = make(m, **options), make(m, dtype, **options)
    inputs, inputs64 = make_inputs(m, dtype), make_inputs(m)
    actual, expected = module(**inputs), by_hand(exact, **inputs64, **options)
    assert actual.dtype == dtype
    assert_close("x'", actual, expected, dtype)
    raw = options.get("value_from") == "compressed"
    unused = ("context",) if raw else ("compressed",)  # if the gate does not read it
    if options.get("value") == "constant":
        unused = ("compressed", "context")
    assert_same_gradients(
        gradients(actual, inputs, module),
        gradients(expected, inputs64, exact),
        dtype,
        may_vanish=unused,
    )


@branches
def test_gradcheck(options: dict[str, Any]) -> None:
    """Numerical derivatives with respect to the state, the context, F(h) and every parameter."""
    module = make(2, **options)
    names = [name for name, _ in module.named_parameters()]
    inputs = {name: x[:1, :4] for name, x in make_inputs(2).items()}
    leaves = [x.detach().requires_grad_() for x in (*inputs.values(), *module.parameters())]

    def run(*leaves: Tensor) -> Tensor:
        given = dict(zip(inputs, leaves[: len(inputs)], strict=True))
        parameters = dict(zip(names, leaves[len(inputs) :], strict=True))
        return torch.func.functional_call(module, parameters, (), given)

    assert torch.autograd.gradcheck(run, leaves)


# --- initialisation and properties ---------------------------------------------------------------


@directions
@pytest.mark.parametrize("scale", [1e-2, 1.0, 100.0])
def test_a_branch_starts_with_a_direction(options: dict[str, Any], scale: float) -> None:
    """k̂ is a unit vector at initialisation, for any scale of the state."""
    module = DeltaResidual(96, 4, **options | {"direction_hidden": 64})
    h, X = normal(50, 96, dtype=F32), scale * normal(50, 96, 4, dtype=F32)
    k = module.write(X, h, h, None, None).direction
    unit = k.norm(dim=-1) / (k.square().sum(-1) + module.eps_k**2).sqrt()
    assert (unit > 0.97).all()
    assert (k / k.norm(dim=-1, keepdim=True)).std(0).min() > 0.01  # it depends on the token


@directions
def test_the_size_of_the_state_does_not_matter(options: dict[str, Any]) -> None:
    module, inputs = make(3, **options), make_inputs(3)
    x, h = inputs["x"], inputs["context"]
    k, larger = (module.write(X, h, h, None, None).direction for X in (x, 1000 * x))
    assert_close("k", larger, k, torch.bfloat16)  # only the norm's ε_n differs


@pytest.mark.parametrize("options", GATES, ids=name_of)
@pytest.mark.parametrize("beta_init", [0.1, 1.0, 1.9])
def test_every_gate_starts_at_beta_init(options: dict[str, Any], beta_init: float) -> None:
    module = DeltaResidual(D, 3, beta_init=beta_init, **options)
    inputs = make_inputs(3, F32)
    h = inputs["context"]
    gate = module.write(inputs["x"], h, h, *module.value_and_gate(h, None)).gate
    assert_close("beta", gate, torch.full((B, T), beta_init), F32)


def test_a_convolution_starts_as_the_mean_of_the_token_itself() -> None:
    pooled, convolved = (DeltaResidual(D, 3, **options) for options in GATES[:2])
    with torch.no_grad():
        for gate in (pooled.gate, convolved.gate):
            gate.weight.copy_(normal(1, D))
    X, h = normal(B, T, D, 3, dtype=F32), normal(B, T, D, dtype=F32)
    a, b = (
        module.write(X, h, h, *module.value_and_gate(h, None)).gate
        for module in (pooled, convolved)
    )
    assert_close("beta", b, a, F32)
    assert a.std() > 0.1


def test_a_convolved_gate_is_causal_and_looks_back_its_taps() -> None:
    module = make(3, **GATES[1])
    X, h = normal(1, T, D, 3), normal(1, T, D)
    before = module.write(X, h, h, *module.value_and_gate(h, None)).gate
    for t in range(T):
        changed = X.clone()
        changed[:, t] += 1
        touched = (module.write(changed, h, h, *module.value_and_gate(h, None)).gate != before)[
            0
        ].tolist()
        assert touched == [t <= u < t + 3 for u in range(T)]


def test_attention_asks_with_the_context_and_mixes_channels() -> None:
    """If channels are equal, the context does not matter; if they differ, it does."""
    module = make(3, **DIRECTIONS[3])
    h, x = normal(B, T, D), normal(B, T, D, seed=1)
    same = x[..., None].expand(B, T, D, 3)
    a, b = (module.write(same, h, context, None, None).direction for context in (h, -h))
    assert_close("k", a, b, F64)
    X = normal(B, T, D, 3)
    a, b = (module.write(X, h, context, None, None).direction for context in (h, -h))
    assert (a - b).abs().max() > 0.1
