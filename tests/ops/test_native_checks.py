"""What keeps native code right where nothing in Python looks: gradients to fill, the smallest ε."""

from __future__ import annotations

import pytest
import torch

from ddl import _native, functional
from tests.support.bad_input import (
    B,
    D,
    K,
    M,
    arguments,
    call_function,
    call_operator,
    elsewhere,
    refused,
    zeros,
)

X, WEIGHT, STATE = zeros(B, 5, D), zeros(D, M, K), zeros(B, 5, D, M)
DOUBLE = torch.float64


@pytest.mark.parametrize(
    ("weight", "grad_x", "grad_weight", "error", "sentence"),
    [
        (None, X, WEIGHT, ValueError, "`grad_weight` must be None without its parameter"),
        (WEIGHT, X, X, ValueError, "`grad_weight` must have shape (4, 3, 2), got (2, 5, 4)"),
        (
            WEIGHT,
            X,
            WEIGHT.to(DOUBLE),
            TypeError,
            "`grad_weight` must have dtype torch.float32, got torch.float64",
        ),
        (
            WEIGHT,
            X.to(DOUBLE),
            WEIGHT,
            TypeError,
            "`grad_x` must have dtype torch.float32, got torch.float64",
        ),
    ],
)
def test_gradients_of_expand_are_like_what_they_are_of(
    weight, grad_x, grad_weight, error, sentence
):
    with refused(error, sentence):
        _native.expand_backward(X, weight, STATE, grad_x, grad_weight, 1)


@pytest.mark.parametrize("where", ["cpu", "meta", "fake"])
@pytest.mark.parametrize(
    ("name", "number", "least", "below"),
    [
        ("rewrite", "eps_k", "1e-18", 9e-19),
        ("rewrite_read", "eps_k", "1e-18", 1e-300),
        ("read", "norm_eps", "1e-36", 1.5e-37),
    ],
)
def test_an_epsilon_that_vanishes_in_float32_is_refused(where, name, number, least, below):
    for call in (call_function, call_operator):
        with refused(ValueError, f"`{number}` must be at least {least}, got {below}"):
            call(name, elsewhere(where, arguments(name, {number: below})))


@pytest.mark.parametrize("flush", [False, True])
def test_the_smallest_epsilons_keep_zeros_finite(flush):
    given = arguments("rewrite_read", {"eps_k": 1e-18, "norm_eps": 1e-36})
    leaves = {n: x.requires_grad_() for n, x in given.items() if isinstance(x, torch.Tensor)}
    numbers = {n: x for n, x in given.items() if n not in leaves}
    torch.set_flush_denormal(flush)
    try:
        outputs = functional.rewrite_read(**leaves, **numbers)
        sum(output.sum() for output in outputs).backward()
    finally:
        torch.set_flush_denormal(False)
    for name, leaf in leaves.items():
        assert leaf.grad.isfinite().all(), name
    assert all(output.isfinite().all() for output in outputs)
