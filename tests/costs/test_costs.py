"""Costs that do not depend on the machine's speed: those of recorded.json, or the test fails.

A change that is meant to cost something else, more or less, records it anew, from a clean tree:
`.venv/bin/python -m tests.costs --record`.
"""

from __future__ import annotations

import pytest
import torch

from ddl.lab.config import PUBLISHED
from tests.costs import calls, tracer
from tests.costs.__main__ import recorded, release
from tests.costs.instructions import CASES, DIRECTIONS, per_token

ALLOWED = 0.05  # of instructions; another compiler orders some of them otherwise
QUICK = ["rewrite", "read", "rewrite_read", "expand"]
AGAIN = "if this is meant: python -m tests.costs --record"

can_trace = pytest.mark.skipif(tracer.unsupported() is not None, reason=str(tracer.unsupported()))
same_torch = pytest.mark.skipif(
    recorded()["torch"] != release(), reason="recorded with another version of torch"
)


@can_trace
@pytest.mark.parametrize("names", [
    QUICK,
    pytest.param([name for name in CASES if name not in QUICK], marks=pytest.mark.exhaustive),
], ids=["each operator", "over time and in bfloat16"])  # fmt: skip
def test_instructions_per_token(names):
    before = recorded()["instructions per token"]
    for name, now in per_token(names).items():
        ratio = now / before[name]
        assert abs(ratio - 1) < ALLOWED, f"{name}: {now}, {ratio:.3f} of {before[name]}; {AGAIN}"


@can_trace
@pytest.mark.exhaustive
def test_erasing_nothing_takes_fewer():
    operators = ("rewrite", "rewrite_read")
    of = per_token([name + kind for name in operators for kind in ("", ", nothing erased")])
    for name in operators:
        for way in DIRECTIONS:
            assert of[f"{name}, nothing erased, {way}"] < of[f"{name}, {way}"], (name, way)


@can_trace
@pytest.mark.exhaustive
def test_narrower_vectors_are_noticed(monkeypatch):
    monkeypatch.setattr("tests.costs.instructions.VECTORS", "portable")
    before = recorded()["instructions per token"]
    for name, now in per_token(["rewrite"]).items():
        assert now > (1 + ALLOWED) * before[name], name


@pytest.fixture(scope="module")
def steps():
    return calls.in_a_child()


@same_torch
@pytest.mark.parametrize("step", ["training step", "decode step"])
@pytest.mark.parametrize("residual", PUBLISHED)
def test_calls_and_allocations(step, residual, steps):
    assert steps[step][residual] == recorded()[step][residual], AGAIN


def test_one_more_tensor_is_noticed():
    x = torch.ones(3)
    one, two = calls.count(lambda: x.neg()), calls.count(lambda: x.neg().neg())
    assert one == {"calls of ddl": 0, "calls of torch": 1, "allocations": 1}
    assert two == {"calls of ddl": 0, "calls of torch": 2, "allocations": 2}
