"""`ddl bench ops`: each operator, forward and backward, against plain PyTorch and a copy."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ddl import functional

from . import plain
from .clock import Clock
from .measure import MismatchError, gb_per_second
from .problems import OPS, TOLERANCES, Case, Operator, Problem, build, check, cotangents, forms_of
from .row import Row, Stages, time_stages
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


@dataclass
class Form:
    """An operator in one form: its check, and its times beside a copy's.

    bytes: of the copy, of a forward and of its backward. seconds: of these three, for each round.
    red: why the check failed; the form is then not timed. worst: the largest error, divided by its
    tolerance. check_seconds: compilation included.
    """

    bytes: tuple[int, int, int]
    seconds: list[tuple[float, ...]] = field(default_factory=list)
    red: str | None = None
    worst: float | None = None
    check_seconds: float = 0.0

    def to_json(self) -> dict[str, Any]:
        """The check as JSON types; the times and rates of copy, forward and backward, if any."""
        made: dict[str, Any] = {"gate": {"red": self.red, "worst": self.worst}}
        columns = zip(*self.seconds, strict=True)
        parts = zip(("copy", "forward", "backward"), self.bytes, columns, strict=False)
        for name, moved, taken in parts:
            rate, median = gb_per_second(moved, taken), statistics.median(taken)
            made[name] = {"bytes": moved, "gb_s": rate, "median": median, "seconds": list(taken)}
        return made


def time_forms(
    case: Case, forms: Mapping[str, Operator], clock: Clock, rounds: int
) -> dict[str, Form]:
    """Check every form at the size to be timed, then time those that agree, in the same rounds.

    forms: by name; "fused" has the tolerances of the operators, others those of plain PyTorch.
    """
    clock.release()
    problems = [build(case, clock.device, seed) for seed in range(argument_sets(case, clock))]
    moved = (clock.copied_bytes, problems[0].forward_bytes, problems[0].backward_bytes)
    found: dict[str, Form] = {}
    timed: dict[str, Stages] = {}
    for name, op in forms.items():
        form = found[name] = Form(moved)
        started = time.perf_counter()
        try:
            allowed = TOLERANCES if name == "fused" else PLAIN_TOLERANCES
            form.worst = check(case, problems[0], op, allowed)
        except MismatchError as difference:
            form.red = str(difference)
        else:
            timed[name] = stages(problems, op)
        form.check_seconds = time.perf_counter() - started
    for name, taken in time_stages(timed, clock, rounds, case.name).items():
        found[name].seconds = [
            (copy, *(half / len(problems) for half in halves)) for copy, *halves in taken
        ]
    return found


def rows(setting: Setting, clock: Clock) -> Iterator[Row]:
    """Two rows, forward and backward, for each form of each operator."""
    dtype = setting.torch_dtype
    d, m = setting.hidden_size, setting.value_channels
    for op in OPS:
        for form in forms_of(op, m):
            case = Case(op, form, d, m, setting.batch, setting.time, dtype, dtype)
            yield from measure(case, setting.repeats, clock)


def measure(case: Case, rounds: int, clock: Clock) -> list[Row]:
    """The rows of an operator; the baseline is the faster style of plain PyTorch in each half."""
    forms: dict[str, Operator] = {"fused": getattr(functional, case.op)}
    for style in plain_styles(case):
        forms[style] = partial(getattr(plain, case.op), style=style)
    timed = time_forms(case, forms, clock, rounds)
    copies = [copy for form in timed.values() for copy, *_ in form.seconds]
    fused = timed.pop("fused")
    wrong = [f"plain PyTorch ({name}): {form.red}" for name, form in timed.items() if form.red]
    red = fused.red or next(iter(wrong), None)
    what = f"{case.op} {case.form}".strip()
    made = []
    for at, half in enumerate(("forward", "backward"), start=1):
        row = Row("ops", f"{what} {half}", "plain PyTorch", red, fused.worst, fused.bytes[at])
        if red is None:
            row.seconds = [times[at] for times in fused.seconds]
            styles = ([times[at] for times in form.seconds] for form in timed.values())
            row.baseline_seconds = min(styles, key=statistics.median)
            row.copy_gb_s = gb_per_second(clock.copied_bytes, copies)
        made.append(row)
    return made
