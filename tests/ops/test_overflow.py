"""A direction whose |k|² overflows makes its token NaN, instead of writing nothing to it."""

from __future__ import annotations

import pytest
import torch

from ddl import functional, reference
from tests.ops.test_ops import run
from tests.support.op_cases import BF16, F16, F32, F64, inputs, parameters
from tests.support.tolerances import assert_close, compute_dtype

# Each k_i² is finite, but not the sum of the 20 squares.
OVERFLOWING = [(F32, F32, 1e19), (BF16, BF16, 1e19), (F16, F32, 1e19), (F64, F64, 1e154)]
MODULES = pytest.mark.parametrize("module", [functional, reference], ids=["fused", "reference"])


@MODULES
@pytest.mark.parametrize("m", [1, 4])
@pytest.mark.parametrize(("state", "direction", "size"), OVERFLOWING, ids=str)
def test_its_token_alone_becomes_nan(state, direction, size, m, module):
    drawn = inputs((2, 40), 20, m)
    tensors = {n: t.to(compute_dtype(state)) for n, t in drawn.items()}
    tensors |= {"state": drawn["state"].to(state), "direction": drawn["direction"].to(direction)}
    plain = run(module, "rewrite", tensors, state, eps_k=0.1)
    tensors["direction"][1, 5] = size
    spoiled = run(module, "rewrite", tensors, state, eps_k=0.1)
    for expected, actual in zip(plain, spoiled, strict=True):
        for name in expected:
            kept, nan = expected[name].clone(), actual[name][1, 5].isnan()
            assert nan.all(), f"{name} of the token has {(~nan).sum()} numbers"
            kept[1, 5] = float("nan")
            assert torch.equal(actual[name].nan_to_num(7.0), kept.nan_to_num(7.0)), name


@MODULES
def test_the_largest_direction_that_does_not_overflow_is_written(module):
    tensors = {n: t.float() for n, t in inputs((2, 4), 16, 2).items()}
    tensors["direction"].fill_(4e18)  # |k|² = 2.6e38
    new = module.rewrite(**tensors, eps_k=0.1)
    unit = {**tensors, "direction": torch.full_like(tensors["direction"], 0.25)}
    assert_close("state", new, module.rewrite(**unit, eps_k=1e-9), F32)


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
@pytest.mark.parametrize(("m", "compress"), [(4, "channel"), (3, "token"), (1, "identity")])
def test_nan_spreads_as_in_the_reference(dtype, m, compress):
    drawn = inputs((2, 40), 20, m) | parameters(20, m, compress)
    tensors = {n: None if t is None else t.to(dtype) for n, t in drawn.items()}
    tensors |= {n: drawn[n].float() for n in ("value", "gate")}
    tensors["direction"][1, 5] = 1e19
    fused, oracle = (
        run(module, "rewrite_read", tensors, dtype, eps_k=0.1) for module in (functional, reference)
    )
    assert oracle[0]["state"][1, 5].isnan().all()
    for actual, expected in zip(fused, oracle, strict=True):
        for name in expected:
            assert torch.equal(actual[name].isnan(), expected[name].isnan()), name
