"""The plans that are compared on a GPU: each is one, another than the planner's, and right."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ddl import _native, functional
from tests.benchmarks.test_benchmarks import load
from tests.support.emulated_device import needs_emulator

__all__ = ["load"]  # a fixture


class AskedError(Exception):
    """Ends a call where it asks for a kernel."""


def plan_of(load: Any, choice: Any, plan: str) -> str:
    """The macros of a choice's half under a plan, on an H200's limits."""
    fields = load("gpu.calls").case(*choice[:4], {"batch": 1, "time": 8}, "bfloat16")
    case = load("gpu.jobs").case_of(fields)
    problem = load("ddl.lab.bench.problems").build(case)
    op = getattr(functional, case.op)
    outputs = problem.outputs(op)
    asked: list[str] = []

    def record(source: str, defines: list[str]) -> str:
        asked.append(" ".join([source, *defines[defines.index(_first_of_a_plan(defines)) :]]))
        raise AskedError

    def backward() -> Any:
        given = [torch.ones_like(output) for output in outputs]
        return torch.autograd.grad(outputs, problem.leaves, given)

    call = backward if choice.aim == "backward" else lambda: problem.outputs(op)
    _native.emulate(record, **load("gpu.worker").limits(plan))
    try:
        with pytest.raises(AskedError):
            call()
    finally:
        _native.emulate(None)
    return asked[0]


def _first_of_a_plan(defines: list[str]) -> str:
    return next(define for define in defines if define.startswith("CLUSTER="))


@needs_emulator
def test_every_plan_to_compare_is_one_that_the_planner_does_not_take(load: Any) -> None:
    for choice in load("gpu.plans").CHOICES:
        own = plan_of(load, choice, "")
        for plan in choice.plans:
            words = plan_of(load, choice, plan)
            if "CHUNK" in plan:  # an argument, no macro
                assert words == own
            else:
                assert words != own, (choice, plan)
                assert set(plan.split()) <= set(words.split()), (choice, plan)


@needs_emulator
@pytest.mark.exhaustive
@pytest.mark.parametrize("index", range(11))
def test_every_plan_to_compare_is_right(load: Any, index: int) -> None:
    plans, worker, jobs = load("gpu.plans"), load("gpu.worker"), load("gpu.jobs")
    choice = plans.CHOICES[index]
    assert len(plans.CHOICES) == 11
    case = load("gpu.calls").case(*choice[:4], {"batch": 1, "time": 9}, "bfloat16")
    for plan in choice.plans:
        with worker.place("emulated", plan):
            (line,) = jobs.smoke(jobs.clock_of("cpu"), case)
        assert line["gate"]["red"] is None


def test_a_plan_stands_beside_the_planners_own(load: Any) -> None:
    problem = {"part": "plans", "op": "expand", "form": "conv", "d": 8, "m": 4, "aim": "backward"}
    problem["copy"] = {"gb_s": 100.0}
    own = problem | {"forward": {"gb_s": 80.0}, "backward": {"gb_s": 40.0}}
    better = own | {"plan": "CHUNK=8", "backward": {"gb_s": 60.0}}
    red = problem | {"plan": "CHUNK=9", "gate": {"red": "wrong"}}
    rows = load("gpu.tables").plans([own, better, red]).rows
    assert [row[4:] for row in rows] == [
        ["", "backward", "80", "40", "1.00"],
        ["CHUNK=8", "backward", "80", "60", "1.50"],
        ["CHUNK=9", "backward", "RED", "", ""],
    ]
