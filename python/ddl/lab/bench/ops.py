"""`ddl bench ops`: each operator, forward and backward, against plain PyTorch and a copy."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ddl import functional

from . import plain_ops
from .clock import Clock
from .measure import MismatchError
from .problems import OPS, TOLERANCES, Case, Operator, Problem, build, check, cotangents, forms_of
from .row import Row, Stages, copy_rate, time_stages
from .setting import Setting

# Plain PyTorch rounds to bfloat16 where the fused operators do not.
PLAIN_TOLERANCES = TOLERANCES | {torch.bfloat16: 5e-2}
MOST_SETS = 8


def plain_styles(case: Case) -> list[str]:
    """The styles of plain.py, if they differ; which one is faster depends on the device."""
    contracts = case.op.startswith("rewrite") and case.m > 1
    both = contracts or case.form in ("token", "conv")
    return ["products", "broadcasts"] if both else ["products"]


def argument_sets(case: Case, clock: Clock) -> int:
    """Number of argument sets to cycle through, so that each set has left the cache when it recurs.

    All outputs are kept until the last call, so that they do not reuse each other's memory.
    """
    state = case.batch * case.time * case.d * case.m * case.state.itemsize
    return min(MOST_SETS, math.ceil(4 * clock.cache_bytes / state))


def stages(problems: list[Problem], op: Operator) -> list[Callable[[], Any]]:
    """Two stages: a forward under autograd for each set of arguments, then their backwards."""
    incoming = [cotangents(problem.outputs(op)) for problem in problems]
    outputs: list[list[Tensor]] = []

    def forward() -> None:
        outputs.extend(problem.outputs(op) for problem in problems)

    def backward() -> list[Any]:
        calls = zip(outputs, problems, incoming, strict=True)
        grads = [torch.autograd.grad(out, p.leaves, given) for out, p, given in calls]
        outputs.clear()
        return grads

    return [forward, backward]


def rows(setting: Setting, clock: Clock) -> Iterator[Row]:
    """Two rows, forward and backward, for each form of each operator."""
    dtype = setting.torch_dtype
    d, m = setting.hidden_size, setting.value_channels
    for op in OPS:
        for form in forms_of(op, m):
            case = Case(op, form, d, m, setting.batch, setting.time, dtype, dtype)
            clock.release()
            yield from measure(case, setting.repeats, clock)


def measure(case: Case, rounds: int, clock: Clock) -> list[Row]:
    """Check both forms at the size to be timed, and time them in the same rounds if they agree."""
    problems = [build(case, clock.device, seed) for seed in range(argument_sets(case, clock))]
    what = f"{case.op} {case.form}".strip()
    halves = [
        Row("ops", f"{what} {half}", "plain PyTorch", bytes=moved)
        for half, moved in (
            ("forward", problems[0].forward_bytes),
            ("backward", problems[0].backward_bytes),
        )
    ]
    forms: dict[str, Operator] = {"fused": getattr(functional, case.op)}
    for style in plain_styles(case):
        forms[style] = partial(getattr(plain_ops, case.op), style=style)
    timed: dict[str, Stages] = {}
    for name, op in forms.items():
        fused = name == "fused"
        try:
            worst = check(case, problems[0], op, TOLERANCES if fused else PLAIN_TOLERANCES)
        except MismatchError as difference:
            red = str(difference) if fused else f"plain PyTorch ({name}): {difference}"
            for row in halves:
                row.red = red
            return halves
        if fused:
            for row in halves:
                row.worst = worst
        timed[name] = stages(problems, op)
    taken = time_stages(timed, clock, rounds, what)
    fill(halves, taken, len(problems), copy_rate(taken, clock))
    return halves


def fill(
    halves: list[Row], taken: dict[str, list[tuple[float, ...]]], sets: int, rate: float
) -> None:
    """Put the times of one call into the rows; the baseline is the faster style of each half."""
    for at, row in enumerate(halves, start=1):
        by_form = {name: [times[at] / sets for times in each] for name, each in taken.items()}
        row.seconds = by_form.pop("fused")
        row.baseline_seconds = min(by_form.values(), key=statistics.median)
        row.copy_gb_s = rate
