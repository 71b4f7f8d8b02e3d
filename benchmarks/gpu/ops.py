"""Times the operators on a device: fused and plain PyTorch, forward and backward, and a copy."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ddl import functional
from ddl.bench import plain_ops
from ddl.bench.clock import Clock
from ddl.bench.measure import RedGateError, gb_per_second, interleave
from ddl.bench.problems import TOLERANCES, Case, Operator, Problem, build, check, cotangents
from gpu.log import Line

# By the name of the state's dtype: the dtypes of the state (and parameters) and of k and h. A
# float32 model under bfloat16 autocast has the second pair.
STORAGE = {
    "bfloat16": (torch.bfloat16, torch.bfloat16),
    "float32": (torch.float32, torch.bfloat16),
}
PLAIN_TOLERANCES = TOLERANCES | {torch.bfloat16: 5e-2}  # it rounds where the fused ones do not
MOST_COPIES = 8


def full_name(case: Case) -> str:
    return f"{case.name} {storage(case)}"


def storage(case: Case) -> str:
    return str(case.state).removeprefix("torch.")


def plain_forms(case: Case) -> list[str]:
    """Both styles of plain PyTorch if they differ. The report takes the faster one."""
    contracts = case.op.startswith("rewrite") and case.m > 1
    both = contracts or case.form in ("token", "conv")
    return ["eager products", "eager broadcasts"] if both else ["eager products"]


def operator(case: Case, form: str, backend: str) -> Operator:
    """The operator in one form: "fused", or "eager" or "compiled" with a style."""
    if form == "fused":
        return getattr(functional, case.op)
    mode, _, style = form.partition(" ")
    op = getattr(plain_ops, case.op)
    if mode == "compiled":
        op = torch.compile(op, fullgraph=True, dynamic=False, backend=backend)
    return partial(op, style=style)


def interleave_forms(
    case: Case, forms: Sequence[str], clock: Clock, rounds: int, backend: str
) -> list[Line]:
    """Check every form at the size to be timed, then time those that passed, interleaved."""
    clock.release()
    problems = [build(case, clock.device, seed) for seed in range(copies(case, clock))]
    lines: dict[str, Line] = {}
    steps = {}
    for form in forms:
        op = operator(case, form, backend)
        lines[form] = line = {"what": f"{full_name(case)} {form}", **case.sizes()}
        line |= {"state": storage(case), "candidate": form, "gate": {"red": None}}
        tolerances = TOLERANCES if form == "fused" else PLAIN_TOLERANCES
        started = time.perf_counter()
        try:
            line["gate"]["worst"] = check(case, problems[0], op, tolerances)
        except RedGateError as difference:
            line["gate"]["red"] = str(difference)
        else:
            steps[form] = clock.timed(*stages(problems, op))
        line["check_s"] = round(time.perf_counter() - started, 3)  # compilation included
    seconds = interleave(steps, rounds, what=full_name(case)) if steps else {}
    for form, taken in seconds.items():
        lines[form] |= rates(problems, taken, clock)
    if any(form.startswith("compiled") for form in forms):
        torch._dynamo.reset()  # the next case cannot reuse it
    return list(lines.values())


def copies(case: Case, clock: Clock) -> int:
    """Number of argument sets to cycle through, so that each set has left the cache when it recurs.

    All outputs are kept until the last call, so that they do not reuse each other's memory.
    """
    state = case.batch * case.time * case.d * case.m * case.state.itemsize
    return min(MOST_COPIES, math.ceil(4 * clock.cache_bytes / state))


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


def rates(problems: list[Problem], taken: list[tuple[float, ...]], clock: Clock) -> Line:
    """Microseconds, GB/s and share of the copy's rate, from medians over the rounds."""
    copy, *halves = zip(*taken, strict=True)
    copy_rate = gb_per_second(clock.copied_bytes, copy)
    line: Line = {"copy_gb_s": copy_rate, "copies": len(problems)}
    moved = (problems[0].forward_bytes, problems[0].backward_bytes)
    for name, num_bytes, half in zip(("forward", "backward"), moved, halves, strict=True):
        seconds = [elapsed / len(problems) for elapsed in half]
        rate = gb_per_second(num_bytes, seconds)
        line[name] = {
            "bytes": num_bytes,
            "us": 1e6 * statistics.median(seconds),
            "gb_s": rate,
            "of_copy": rate / copy_rate,
            "all_us": [round(1e6 * elapsed, 2) for elapsed in seconds],
        }
    return line
