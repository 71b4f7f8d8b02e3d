"""What only the functional forms see and refuse, and what they take although it looks odd."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from ddl import functional, reference
from tests.support.bad_input import (
    SHAPES,
    SINGLE,
    STATE,
    B,
    Case,
    D,
    M,
    T,
    arguments,
    call_function,
    elsewhere,
    refused,
    zeros,
)
from tests.support.op_cases import F32, F64, inputs
from tests.support.tolerances import assert_close

DOUBLE = zeros(*SHAPES["state"], dtype=F64)
NOT_POSITIVE = [0, 0.0, -1.0, math.nan, math.inf, -math.inf, "0.1", True]
NOT_DENSE = {
    "layout torch.sparse_coo": zeros(T, D).to_sparse(),
    "layout torch._mkldnn": zeros(T, D).to_mkldnn(),
    "a nested tensor": torch.nested.nested_tensor([zeros(2, D), zeros(3, D)], layout=torch.jagged),
}
ARGUMENTS: list[Case] = [
    *(
        Case(
            name,
            {number: bad},
            ValueError,
            f"`{number}` must be a positive finite number, got {bad!r}",
        )
        for name, number in (
            ("rewrite", "eps_k"),
            ("rewrite_read", "eps_k"),
            ("read", "norm_eps"),
            ("rewrite_read", "value_scale"),
        )
        for bad in NOT_POSITIVE
    ),
    *(
        Case(name, {"state": zeros()}, ValueError, f"{STATE}()")
        for name in ("rewrite", "rewrite_read")
    ),
    Case("read", {"state": zeros()}, ValueError, f"{STATE}()"),
    Case(
        "rewrite", {"eps_k": None}, ValueError, "`eps_k` must be a positive finite number, got None"
    ),
    Case(
        "read",
        {"value_from": "state"},
        ValueError,
        '`value_from` must be "context" or "compressed", got \'state\'',
    ),
    Case(
        "rewrite_read",
        {"value_from": None},
        ValueError,
        '`value_from` must be "context" or "compressed", got None',
    ),
    *(
        Case(
            "read",
            {"context_dtype": bad},
            TypeError,
            f"`context_dtype` must be {SINGLE}, got {bad!r}",
        )
        for bad in (F64, torch.int64, torch.complex64, "float32", 1)
    ),
    Case(
        "read",
        {"state": DOUBLE, "context_dtype": F32},
        TypeError,
        "`context_dtype` must be torch.float64, got torch.float32",
    ),
    Case(
        "expand", {"x": zeros()}, ValueError, "`x` must have shape (…, time, hidden_size), got ()"
    ),
    Case(
        "expand",
        {"x": zeros(D)},
        ValueError,
        "`x` must have shape (…, time, hidden_size), got (4,)",
    ),
    Case(
        "expand",
        {"x": zeros(B, 0), "weight": None},
        ValueError,
        "`x` must have shape (…, hidden_size), got (2, 0)",
    ),
    *(
        Case(
            "expand",
            {"value_channels": bad},
            ValueError,
            f"`value_channels` must be an integer of at least 1, got {bad!r}",
        )
        for bad in (0, -1, 1.5, True, None, "4")
    ),
    *(
        Case(name, {argument: bad}, TypeError, f"`{argument}` must be a torch.Tensor, got {kind}")
        for bad, kind in ((1.0, "float"), ([0.0], "list"), (np.zeros(4), "ndarray"))
        for name, argument in (
            ("rewrite", "state"),
            ("rewrite", "gate"),
            ("read", "gate_bias"),
            ("rewrite_read", "direction"),
            ("expand", "weight"),
        )
    ),
    *(
        Case(
            name, {argument: None}, TypeError, f"`{argument}` must be a torch.Tensor, got NoneType"
        )
        for name, argument in (
            ("rewrite", "state"),
            ("rewrite", "direction"),
            ("read", "state"),
            ("rewrite_read", "value"),
            ("expand", "x"),
        )
    ),
]


@pytest.mark.parametrize("where", ["cpu", "meta"])
@pytest.mark.parametrize("case", ARGUMENTS, ids=str)
def test_arguments(case: Case, where: str) -> None:
    given = elsewhere(where, arguments(case.name, case.change))
    with refused(case.error, case.sentence):
        call_function(case.name, given)


@pytest.mark.parametrize("got", NOT_DENSE)
@pytest.mark.parametrize(
    ("name", "argument"),
    [("rewrite", "state"), ("read", "norm_weight"), ("rewrite_read", "direction"), ("expand", "x")],
)
def test_layouts(name: str, argument: str, got: str) -> None:
    with refused(TypeError, f"`{argument}` must be a dense tensor, got {got}"):
        call_function(name, arguments(name, {argument: NOT_DENSE[got]}))


def test_memory_that_was_given_back() -> None:
    """As a sharded parameter is between two uses."""
    state = zeros(*SHAPES["state"])
    state.untyped_storage().resize_(0)
    with refused(TypeError, "`state` must be a tensor with memory behind it, got Tensor"):
        call_function("rewrite", arguments("rewrite", {"state": state}))


# --- what is not refused -------------------------------------------------------------------------


@pytest.mark.parametrize("beta", [-1.0, 2.5, 1e4])
def test_any_gate_is_taken_as_it_is(beta: float) -> None:
    """β is meant to be in [0, 2]; beyond, the equation still says what is written."""
    tensors = inputs((2, 9), 20, 3)
    tensors["gate"].fill_(beta)
    expected = reference.rewrite(**tensors, eps_k=0.1)
    assert_close("state", functional.rewrite(**tensors, eps_k=0.1), expected, F64)


def test_a_view_with_its_sign_pending() -> None:
    """torch negates imaginary parts of conjugates lazily; the memory has the other sign."""
    state = torch.randn(2, 9, D, M, dtype=torch.complex64).conj().imag
    assert state.is_neg()
    weight = torch.ones(D, M)
    actual = functional.read(state, compress=weight).context
    expected = functional.read(state.resolve_neg(), compress=weight).context
    assert torch.equal(actual, expected)


def test_numbers_of_other_kinds() -> None:
    """An integer or a NumPy scalar is a number, too."""
    given = arguments("rewrite", {"state": torch.randn(SHAPES["state"]), "gate": torch.ones(B, T)})
    given |= {"direction": torch.randn(SHAPES["direction"])}
    results = [functional.rewrite(**given | {"eps_k": eps}) for eps in (1, 1.0, np.float32(1))]
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])
