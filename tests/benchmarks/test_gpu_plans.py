"""The planner's table is that of the records, and the plans that are compared with it are right."""

from __future__ import annotations

from pathlib import Path
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


def test_the_table_is_written_from_the_records(load: Any) -> None:
    plans = load("gpu.plans")
    assert plans.TABLE.read_text(encoding="utf-8") == plans.table(), plans.COMMAND


@needs_emulator
def test_a_measured_kernel_has_the_best_plan_that_was_timed(load: Any) -> None:
    plans = load("gpu.plans")
    halves = {kernel: half for half, kernel in plans.HALVES.items()}
    best = plans.best(load("ddl.lab.bench.jsonl").read(plans.RESULTS / "gpu-plans.jsonl"))
    assert len(best) == 36
    for (kernel, form, m, state, _, d), one in best.items():
        choice = plans.Choice(form, d, m, state, halves[kernel], "")
        plan = plan_of(load, choice, "")
        if "TILE=4" in plan:  # src/cuda/plan/tile.rs; no record has times of tiles yet
            assert (kernel, form) == ("rewrite_read_fwd", "token")
            continue
        assert plan.replace(" TILE=0", "") == f"{kernel} {one.plan}", choice


def record(
    ms: float, blocks: int, *, spilled: int = 0, tile: int = 0, **fields: Any
) -> dict[str, Any]:
    """A day's record of a backward whose two kernels have the same plan."""
    macros = f"CLUSTER=1 THREADS=64 ALIGN=16 TILE={tile} BLOCKS={blocks}"
    plan = f"{macros}, 99 registers, {spilled} bytes spilled"
    names = ("rewrite_read_bwd", "rewrite_read_bwd with a chain")
    case = {"op": "rewrite_read", "form": "channel", "d": 768, "m": 4, "state": "float32"}
    kernels = [f"{name} {plan}" for name in names]
    return (
        {"part": "plans"} | case | {"kernels": kernels, "backward": {"median": ms / 1e3}} | fields
    )


def test_a_newer_record_decides_about_its_kernels(load: Any, tmp_path: Path) -> None:
    plans, jsonl = load("gpu.plans"), load("ddl.lab.bench.jsonl")
    old = {"kernel": "rewrite_read_bwd", "spilled": 0, "plan": "CLUSTER=2 ALIGN=16 BLOCKS=1"}
    for d in (768, 2048):
        line = record(0, 0, d=d, seconds=1e-9) | old
        jsonl.append(tmp_path / "gpu-plans.jsonl", {k: line[k] for k in line if k != "kernels"})
    lines = [
        record(1.1, 4),
        record(1.0, 3, plan="BLOCKS=3"),
        record(0.9, 2, plan="BLOCKS=2", spilled=8),
        record(0.8, 4, plan="ORDER=0"),
        record(0.7, 7, tile=4),
        record(1.2, 5, links=1),
        record(1.3, 6, links=3),
    ]
    for line in lines:
        jsonl.append(tmp_path / "gpu-day.jsonl", line)
    assert plans.table(tmp_path).splitlines()[1:] == [
        "rewrite_read_bwd channel 4 float32 chain 768 CLUSTER=1 THREADS=64 BLOCKS=5",
        "rewrite_read_bwd channel 4 float32 stored 768 CLUSTER=1 THREADS=64 BLOCKS=3",
        "rewrite_read_bwd channel 4 float32 stored 2048 CLUSTER=2 BLOCKS=1",
    ]
    rows = load("gpu.tables").planned(lines[:2]).rows
    assert [row[6:8] for row in rows] == [["1100", "1.100 ✗ ≤ 1.02"]]
