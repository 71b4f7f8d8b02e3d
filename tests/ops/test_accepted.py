"""Unusual arguments that the operators accept."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from ddl import functional, reference
from tests.support.helpers import present
from tests.support.op_cases import F64, inputs
from tests.support.refused_cases import SHAPES, B, D, M, T, arguments
from tests.support.tolerances import assert_close


@pytest.mark.parametrize("beta", [-1.0, 2.5, 1e4])
def test_any_gate_is_accepted(beta: float) -> None:
    """β is meant to be in [0, 2]; outside, the equation still holds."""
    tensors = inputs((2, 9), 20, 3)
    tensors["gate"].fill_(beta)
    expected = reference.rewrite(**tensors, eps_k=0.1)
    assert_close("state", functional.rewrite(**tensors, eps_k=0.1), expected, F64)


def test_a_view_with_its_sign_pending() -> None:
    """torch negates the imaginary part of a conjugate lazily: the memory has the other sign."""
    state = torch.randn(2, 9, D, M, dtype=torch.complex64).conj().imag
    assert state.is_neg()
    weight = torch.ones(D, M)
    actual = functional.read(state, compress=weight).context
    expected = functional.read(state.resolve_neg(), compress=weight).context
    assert torch.equal(actual, expected)


def test_numbers_of_other_kinds() -> None:
    """Integers and NumPy scalars are accepted as numbers."""
    given = arguments("rewrite", {"state": torch.randn(SHAPES["state"]), "gate": torch.ones(B, T)})
    given |= {"direction": torch.randn(SHAPES["direction"])}
    results = [functional.rewrite(**given | {"eps_k": eps}) for eps in (1, 1.0, np.float32(1))]
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


@pytest.mark.parametrize("flush", [False, True])
def test_the_smallest_epsilons_keep_zeros_finite(flush: bool) -> None:
    given = arguments("rewrite_read", {"eps_k": 1e-18, "norm_eps": 1e-36})
    leaves = {n: x.requires_grad_() for n, x in given.items() if isinstance(x, torch.Tensor)}
    numbers = {n: x for n, x in given.items() if n not in leaves}
    torch.set_flush_denormal(flush)
    try:
        outputs = functional.rewrite_read(**leaves, **numbers)
        sum(output.sum() for output in present(outputs)).backward()
    finally:
        torch.set_flush_denormal(False)
    for name, leaf in leaves.items():
        assert leaf.grad.isfinite().all(), name
    assert all(output.isfinite().all() for output in present(outputs))
