"""Invalid arguments of `delta_rule`: equal messages for CPU, meta and fake tensors."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest
import torch

from tests.support.op_cases import BF16, F64
from tests.support.refused_cases import (
    ANY,
    SINGLE,
    B,
    Case,
    D,
    M,
    T,
    arguments,
    call_function,
    call_operator,
    elsewhere,
    refused,
    zeros,
)


def wrong(argument: str, got: torch.Tensor, expected: str) -> Case:
    sentence = f"`{argument}` must have shape {expected}, got {tuple(got.shape)}"
    return Case("delta_rule", {argument: got}, ValueError, sentence)


def wrong_dtype(argument: str, dtype: torch.dtype, expected: str) -> Case:
    got = arguments("delta_rule", {})[argument].to(dtype)
    sentence = f"`{argument}` must have dtype {expected}, got {dtype}"
    return Case("delta_rule", {argument: got}, TypeError, sentence)


QUERIES = "(batch, time, heads, key_features), the latter two from 1 on"
GATES = f"({B}, {T}, H) or ({B}, {T}, n, H), n and H from 1 on"
CASES = [
    wrong("q", zeros(B, T, D), QUERIES),
    wrong("q", zeros(B, T, 0, D), QUERIES),
    wrong("q", zeros(B, T, 1, 0), QUERIES),
    wrong("q", zeros(B, T, 3, D), "(2, 5, h, 4) with h that divides 2 or a multiple of it"),
    wrong("beta", zeros(B, T), GATES),
    wrong("beta", zeros(B, 4, 2), GATES),
    wrong("beta", zeros(B, T, 0), GATES),
    wrong("beta", zeros(B, T, 0, 2), GATES),
    wrong("k", zeros(B, T, 2, 3), "(2, 5, h, 4) with h that divides 2"),
    wrong("k", zeros(B, T, 4, D), "(2, 5, h, 4) with h that divides 2"),
    wrong("k", zeros(B, T, 0, D), "(2, 5, h, 4) with h that divides 2"),
    wrong("k", zeros(B, T, 1, 2, D), "(2, 5, h, 4) with h that divides 2"),
    wrong("v", zeros(B, T, 3, M), "(2, 5, h, V) with h that divides 2 and V from 1 on"),
    wrong("v", zeros(B, T, 2, 0), "(2, 5, h, V) with h that divides 2 and V from 1 on"),
    wrong("v", zeros(B, T), "(2, 5, h, V) with h that divides 2 and V from 1 on"),
    Case(
        "delta_rule",
        {"beta": zeros(B, T, 3, 2)},
        ValueError,
        "`k` must have shape (2, 5, 3, h, 4) with h that divides 2, got (2, 5, 2, 4)",
    ),
    wrong("g", zeros(B, T, 1), "(2, 5, 2) or (2, 5, 2, 4)"),
    wrong("g", zeros(B, T, 2, 3), "(2, 5, 2) or (2, 5, 2, 4)"),
    wrong("initial_state", zeros(B, 1, D, M), "(2, 2, 4, 3)"),
    wrong("document_starts", zeros(B, 1).bool(), "(2, 5)"),
    wrong_dtype("q", torch.int64, ANY),
    wrong_dtype("k", torch.int64, ANY),
    wrong_dtype("k", F64, SINGLE),
    wrong_dtype("v", F64, SINGLE),
    wrong_dtype("beta", F64, "torch.float32"),
    wrong_dtype("g", F64, "torch.float32"),
    wrong_dtype("initial_state", F64, "torch.float32"),
    Case(
        "delta_rule",
        {"document_starts": zeros(B, T)},
        TypeError,
        "`document_starts` must have dtype torch.bool, got torch.float32",
    ),
]


@pytest.mark.parametrize("where", ["cpu", "meta", "fake"])
@pytest.mark.parametrize("call", [call_function, call_operator])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_tensors(case: Case, call: Any, where: str) -> None:
    given = elsewhere(where, arguments(case.name, case.change))
    with refused(case.error, case.sentence):
        call(case.name, given)


@pytest.mark.parametrize("where", ["cpu", "meta"])
@pytest.mark.parametrize("call", [call_function, call_operator])
@pytest.mark.parametrize("bad", [0.0, -1.0, math.nan, math.inf])
def test_scales(call: Any, bad: float, where: str) -> None:
    given = elsewhere(where, arguments("delta_rule", {"scale": bad}))
    with pytest.raises(ValueError, match=r"^`scale` must be a positive finite number, got "):
        call("delta_rule", given)


@pytest.mark.parametrize("argument", ["q", "k", "v", "beta", "g", "initial_state"])
def test_what_is_no_dense_tensor(argument: str) -> None:
    with refused(TypeError, f"`{argument}` must be a torch.Tensor, got float"):
        call_function("delta_rule", arguments("delta_rule", {argument: 1.0}))
    sparse = arguments("delta_rule", {})[argument].to_sparse()
    with refused(TypeError, f"`{argument}` must be a dense tensor, got layout torch.sparse_coo"):
        call_function("delta_rule", arguments("delta_rule", {argument: sparse}))


@torch.no_grad()
def test_what_a_backward_is_not_given() -> None:
    """Native code checks what the forward saved, too."""
    given = arguments("delta_rule", {})
    forward = torch.ops.ddl.delta_rule
    names = [argument.name for argument in forward.default._schema.arguments]
    values = [(given | {"saves": True}).get(name) for name in names]
    y, state, errors, states = forward(*values)
    backward = torch.ops.ddl.delta_rule_backward
    values = [*values[:-1], errors, states, -1]
    backward(y, state, *values)
    with pytest.raises(
        RuntimeError, match=re.escape(f"`errors` must have shape {tuple(errors.shape)}, got (1,)")
    ):
        backward(y, state, *values[:-3], zeros(1), states, -1)
    with pytest.raises(
        RuntimeError, match=re.escape(f"`states` must have shape {tuple(states.shape)}, got (1,)")
    ):
        backward(y, state, *values[:-3], errors, zeros(1), -1)
    with pytest.raises(
        RuntimeError, match=re.escape(f"`grad_y` must have shape {tuple(y.shape)}, got (1,)")
    ):
        backward(zeros(1), state, *values)
    with pytest.raises(
        RuntimeError, match=r"`grad_y` must have dtype torch\.float32, got torch\.b"
    ):
        backward(y.to(BF16), state, *values)
