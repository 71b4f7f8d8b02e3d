"""The time of each kernel of a call, from PyTorch's profiler: how the main kernels and the sums of
their parameter gradients (`reduce`) share a backward.
"""

from __future__ import annotations

import statistics
from typing import Any

from torch.profiler import ProfilerActivity, profile

from ddl import functional
from ddl.lab.bench.clock import Clock
from ddl.lab.bench.ops import stages
from ddl.lab.bench.problems import Case, build
from gpu.log import Line
from gpu.ops import full_name


def trace(case: Case, clock: Clock, calls: int) -> list[Line]:
    """Median microseconds of every kernel over `calls` forwards and backwards."""
    problem = build(case, clock.device)
    steps = stages([problem], getattr(functional, case.op))
    activity = ProfilerActivity.CUDA if clock.device.type == "cuda" else ProfilerActivity.CPU
    run(steps, 2)
    clock.wait()
    with profile(activities=[activity]) as profiler:
        run(steps, calls)
        clock.wait()
    times: dict[str, list[float]] = {}
    for event in profiler.events():
        if ours(event.name):
            times.setdefault(event.name, []).append(event.time_range.elapsed_us())
    medians = {name: statistics.median(us) for name, us in sorted(times.items())}
    return [{"what": full_name(case), **case.sizes(), "kernels_us": medians}]


def run(steps: list[Any], calls: int) -> None:
    for _ in range(calls):
        for step in steps:
            step()


def ours(name: str) -> bool:
    """Our kernels are extern "C"; on a CPU an operator takes a kernel's place."""
    kernels = ("rewrite_read", "parameters_bwd", "reduce", "expand")
    return name.startswith((*kernels, "ddl::"))
