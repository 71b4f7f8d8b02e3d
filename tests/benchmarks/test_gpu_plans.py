"""The plans that are compared on a GPU: each is one, another than the planner's, and right."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ddl import _native, functional
from tests.benchmarks.test_benchmarks import load
from tests.support.emulated_device import needs_emulator

__all__ = ["load"]  # a fixture
TINY = {"batch": 1, "time": 8}


class StopError(Exception):
    """Ends a call at its request for a kernel."""


def plan_of(load: Any, choice: Any, plan: str) -> str:
    """The macros of a choice's half under a plan, on an H200's limits."""
    fields = load("gpu.day").case(choice.form, choice.d, choice.m, TINY, choice.state)
    problem = load("ddl.lab.bench.problems").build(load("gpu.ops").case_of(fields))
    outputs = problem.outputs(functional.rewrite_read)
    requests: list[str] = []

    def record(source: str, defines: list[str]) -> str:
        first = next(define for define in defines if define.startswith("CLUSTER="))
        requests.append(" ".join([source, *defines[defines.index(first) :]]))
        raise StopError

    def backward() -> Any:
        incoming = [torch.ones_like(output) for output in outputs]
        return torch.autograd.grad(outputs, problem.leaves, incoming)

    forward = problem.outputs
    _native.emulate(record, **load("gpu.worker").limits(plan))
    try:
        with pytest.raises(StopError):
            backward() if choice.half == "backward" else forward(functional.rewrite_read)
    finally:
        _native.emulate(None)
    return requests[0]


def choices(load: Any) -> list[Any]:
    """Those of operators, and those of the backward with a chain."""
    plans = load("gpu.plans")
    chains = [
        plans.Choice(form, 768, 4, state, "backward", plan)
        for form, plan in plans.CHAIN_PLANS.items()
        for state in ("float32", "bfloat16")
    ]
    return [*plans.CHOICES, *chains]


@needs_emulator
def test_plans_are_plans(load: Any) -> None:
    """Each plan has its words, and is another than the planner's."""
    for choice in choices(load):
        own = plan_of(load, choice, "")
        other = plan_of(load, choice, choice.plan)
        if choice.plan == load("gpu.plans").RUNS:  # an argument, no macro
            assert other == own, choice
        else:
            assert set(choice.plan.split()) <= set(other.split())
            assert other != own, choice


@needs_emulator
@pytest.mark.exhaustive
def test_plans_are_right(load: Any) -> None:
    worker = load("gpu.worker")
    for choice in choices(load):
        case = load("gpu.day").case(choice.form, choice.d, choice.m, TINY, choice.state)
        arguments = {"case": case, "rounds": 0}
        (line,) = worker.run("emulated", "operators", arguments, choice.plan)
        assert line["gate"]["red"] is None, choice
