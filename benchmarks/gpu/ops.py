"""Times the operators on a device: fused and plain PyTorch, forward and backward, and a copy."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from functools import partial

import torch

from ddl import functional
from ddl.lab.bench import plain_ops
from ddl.lab.bench.clock import Clock
from ddl.lab.bench.measure import MismatchError, gb_per_second, interleave
from ddl.lab.bench.ops import PLAIN_TOLERANCES, argument_sets, plain_styles, stages
from ddl.lab.bench.problems import TOLERANCES, Case, Operator, Problem, build, check
from gpu.log import Line

# By the name of the state's dtype: the dtypes of the state (and parameters) and of k and h. A
# float32 model under bfloat16 autocast has the second pair.
STORAGE = {
    "bfloat16": (torch.bfloat16, torch.bfloat16),
    "float32": (torch.float32, torch.bfloat16),
}


def full_name(case: Case) -> str:
    return f"{case.name} {storage(case)}"


def storage(case: Case) -> str:
    return str(case.state).removeprefix("torch.")


def plain_forms(case: Case) -> list[str]:
    """Both styles of plain PyTorch if they differ. The report takes the faster one."""
    return [f"eager {style}" for style in plain_styles(case)]


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
    problems = [build(case, clock.device, seed) for seed in range(argument_sets(case, clock))]
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
        except MismatchError as difference:
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
