"""The operators raise for invalid arguments, with equal messages for CPU, meta and fake tensors.

First come the arguments that only `ddl.functional` sees: numbers, names and non-tensors. Then
tensors, for which `torch.ops.ddl` is tested with the same table. Then native code alone.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.support.op_cases import F32, F64
from tests.support.refused_cases import (
    FUNCTIONS,
    READ,
    SHAPES,
    SINGLE,
    STATE,
    B,
    Case,
    D,
    K,
    M,
    T,
    arguments,
    call_function,
    call_operator,
    elsewhere,
    refused,
    wrong_dtype,
    wrong_shape,
    wrong_value,
    zeros,
)

OVER_TIME = "`state` must have shape (…, time, hidden_size, value_channels), got "
DOUBLE = {"state": zeros(*SHAPES["state"], dtype=F64)}
ONE_CHANNEL = {"state": zeros(B, T, D, 1), "compress": zeros(D, M)}

# --- numbers, names and non-tensors ---------------------------------------------------------------

NOT_POSITIVE = [0, 0.0, -1.0, math.nan, math.inf, -math.inf, "0.1", True, 10**400]
POSITIVE = "a positive finite number"
VALUE_FROM = '"context" or "compressed"'
NOT_DENSE = {
    "layout torch.sparse_coo": zeros(T, D).to_sparse(),
    "layout torch._mkldnn": zeros(T, D).to_mkldnn(),
    "a nested tensor": torch.nested.nested_tensor([zeros(2, D), zeros(3, D)], layout=torch.jagged),
}
ARGUMENTS: list[Case] = [
    *(
        wrong_value(name, number, bad, POSITIVE)
        for name, number in (
            ("rewrite", "eps_k"),
            ("rewrite_read", "eps_k"),
            ("read", "norm_eps"),
            ("rewrite_read", "value_scale"),
        )
        for bad in NOT_POSITIVE
    ),
    wrong_value("rewrite", "eps_k", None, POSITIVE),
    *(
        Case(name, {"state": zeros()}, ValueError, f"{STATE}()")
        for name in ("rewrite", "rewrite_read", "read")
    ),
    wrong_value("read", "value_from", "state", VALUE_FROM),
    wrong_value("rewrite_read", "value_from", None, VALUE_FROM),
    *(
        wrong_value("read", "context_dtype", bad, SINGLE, TypeError)
        for bad in (F64, torch.int64, torch.complex64, "float32", 1)
    ),
    Case(
        "read",
        DOUBLE | {"context_dtype": F32},
        TypeError,
        "`context_dtype` must be torch.float64, got torch.float32",
    ),
    wrong_shape("expand", "x", expected="(…, time, hidden_size)"),
    wrong_shape("expand", "x", D, expected="(…, time, hidden_size)"),
    Case(
        "expand",
        {"x": zeros(B, 0), "weight": None},
        ValueError,
        "`x` must have shape (…, hidden_size), got (2, 0)",
    ),
    *(
        wrong_value("expand", "value_channels", bad, "an integer of at least 1")
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
        Case(name, {needed: None}, TypeError, f"`{needed}` must be a torch.Tensor, got NoneType")
        for name, needed in (
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
    """A tensor's storage may be freed, as a sharded parameter's is between two uses."""
    state = zeros(*SHAPES["state"])
    state.untyped_storage().resize_(0)
    with refused(TypeError, "`state` must be a tensor with memory behind it, got one without"):
        call_function("rewrite", arguments("rewrite", {"state": state}))


# --- tensors --------------------------------------------------------------------------------------

TENSORS: list[Case] = [
    Case("rewrite", {"state": zeros(D)}, ValueError, f"{STATE}(4,)"),
    Case("rewrite", {"state": zeros(B, T, 0, M)}, ValueError, f"{STATE}(2, 5, 0, 3)"),
    Case("rewrite_read", {"state": zeros(B, T, D, 0)}, ValueError, f"{STATE}(2, 5, 4, 0)"),
    Case("read", {"state": zeros(D)}, ValueError, f"{STATE}(4,)"),
    wrong_shape("rewrite", "direction", B, T, 3),
    wrong_shape("rewrite", "direction", B, T, D, 1),
    wrong_shape("rewrite", "direction", 1, T, D),
    wrong_shape("rewrite_read", "direction", D),
    wrong_shape("rewrite", "value", B, T, 2),
    wrong_shape("rewrite_read", "value", B, T),
    wrong_shape("rewrite", "gate", B, T, 1),
    wrong_shape("rewrite_read", "gate", B),
    wrong_shape("read", "compress", D, 2),
    wrong_shape("read", "compress", M, D),
    wrong_shape("rewrite_read", "compress", D),
    wrong_shape("read", "compress", D, M, K, 1),
    wrong_shape("read", "compress", D, 2, K, expected="(4, 3, 2)"),
    wrong_shape("read", "compress", 5, M, K, expected="(4, 3, 2)"),
    wrong_shape("read", "norm_weight", 3),
    wrong_shape("read", "gate_weight", D, 1),
    wrong_shape("read", "gate_bias", 1),
    wrong_shape("rewrite_read", "value_weight", D, M),
    wrong_shape("rewrite_read", "value_bias", 1),
    wrong_shape("expand", "weight", D, 2, K),
    wrong_shape("expand", "weight", 5, M, K),
    wrong_shape("expand", "weight", D, M, expected="(4, 3, K) with K ≥ 1"),
    wrong_shape("expand", "weight", D, M, 0, expected="(4, 3, K) with K ≥ 1"),
    Case("read", ONE_CHANNEL, ValueError, "`compress` must have shape (4, 1), got (4, 3)"),
    Case(
        "read",
        {"compress": zeros(D, M, 0)},
        ValueError,
        "`compress` must have at least one tap, got 0",
    ),
    Case(
        "read",
        {"compress": None},
        ValueError,
        "`compress` must be a weight of shape (4, 3) or (4, 3, K) for 3 value channels, got None",
    ),
    Case(
        "read",
        {"state": zeros(D, M), "compress": zeros(D, M, K)},
        ValueError,
        f"{OVER_TIME}(4, 3)",
    ),
    Case(
        "read",
        {"gate_weight": None},
        ValueError,
        "`gate_bias` must come with `gate_weight`, got None for `gate_weight`",
    ),
    Case(
        "rewrite_read",
        {"value_weight": None},
        ValueError,
        "`value_bias` must come with `value_weight`, got None for `value_weight`",
    ),
    *(
        wrong_dtype("rewrite", name, torch.int64)
        for name in ("state", "direction", "value", "gate")
    ),
    *(wrong_dtype("rewrite", name, torch.complex64) for name in ("state", "direction", "gate")),
    *(wrong_dtype("read", name, torch.int32) for name in READ),
    wrong_dtype("read", "state", torch.bool),
    wrong_dtype("rewrite", "state", torch.float8_e4m3fn),
    wrong_dtype("expand", "x", torch.int64),
    wrong_dtype("expand", "x", torch.complex128),
    wrong_dtype("expand", "weight", torch.uint8),
    wrong_dtype("rewrite", "direction", F64, SINGLE),
    wrong_dtype("rewrite", "value", F64, "torch.float32"),
    wrong_dtype("rewrite_read", "gate", F64, "torch.float32"),
    *(wrong_dtype("read", name, F64, SINGLE) for name in READ),
    wrong_dtype("expand", "weight", F64, SINGLE),
    Case(
        "rewrite",
        DOUBLE,
        TypeError,
        "`direction` must have dtype torch.float64, got torch.float32",
    ),
    Case("read", DOUBLE, TypeError, "`compress` must have dtype torch.float64, got torch.float32"),
    Case(
        "expand",
        {"x": zeros(B, T, D, dtype=F64)},
        TypeError,
        "`weight` must have dtype torch.float64, got torch.float32",
    ),
]


@pytest.mark.parametrize("where", ["cpu", "meta", "fake"])
@pytest.mark.parametrize("call", [call_function, call_operator])
@pytest.mark.parametrize("case", TENSORS, ids=str)
def test_tensors(case: Case, call: Any, where: str) -> None:
    given = elsewhere(where, arguments(case.name, case.change))
    with refused(case.error, case.sentence):
        call(case.name, given)


@pytest.mark.parametrize("where", ["cpu", "meta"])
@pytest.mark.parametrize("bad", [0.0, -1.0, math.nan, math.inf])
@pytest.mark.parametrize(
    ("name", "number"),
    [("rewrite", "eps_k"), ("rewrite_read", "norm_eps"), ("read", "value_scale")],
)
def test_numbers_given_to_an_operator(name: str, number: str, bad: float, where: str) -> None:
    given = elsewhere(where, arguments(name, {number: bad}))
    with pytest.raises(ValueError, match=f"^`{number}` must be a positive finite number, got "):
        call_operator(name, given)


@pytest.mark.parametrize("call", [call_function, call_operator])
@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("home", ["cpu", "meta"])
def test_a_mix_of_devices(name: str, home: str, call: Any) -> None:
    """Each argument in turn is on another device than the state."""
    given = arguments(name, {})
    local, remote = given, elsewhere("meta", given)
    away = "meta"
    if home == "meta":
        local, remote, away = remote, local, "cpu"
    call(name, local)
    for argument in list(given)[1:]:
        if isinstance(given[argument], Tensor):
            with refused(ValueError, f"`{argument}` must be on {home}, got a tensor on {away}"):
                call(name, local | {argument: remote[argument]})


# --- native code ----------------------------------------------------------------------------------

X, WEIGHT, GRAD = zeros(B, T, D), zeros(D, M, K), zeros(B, T, D, M)


@pytest.mark.parametrize("where", ["cpu", "meta", "fake"])
@pytest.mark.parametrize(
    ("name", "number", "least", "below"),
    [
        ("rewrite", "eps_k", "1e-18", 9e-19),
        ("rewrite_read", "eps_k", "1e-18", 1e-300),
        ("read", "norm_eps", "1e-36", 1.5e-37),
    ],
)
def test_an_epsilon_that_vanishes_in_float32(
    where: str, name: str, number: str, least: str, below: float
) -> None:
    for call in (call_function, call_operator):
        with refused(ValueError, f"`{number}` must be at least {least}, got {below}"):
            call(name, elsewhere(where, arguments(name, {number: below})))
