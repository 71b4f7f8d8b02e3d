"""The time of each kernel of a call, from PyTorch's profiler: how the main kernels and the sums of
their parameter gradients (`reduce`) share a backward.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import Any

from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from ddl import functional
from ddl.lab.bench.clock import Clock
from ddl.lab.bench.ops import stages
from ddl.lab.bench.problems import Case, build
from gpu.log import Line
from gpu.ops import full_name

NAME, MOST_NAMED = 100, 12  # characters of a kernel's name; the longest kernels of a step


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


def step_kernels(step: Sequence[Callable[[], Any]], clock: Clock) -> dict[str, float]:
    """Milliseconds of a training step by kernel: the longest, all of ours, and the rest as one.

    Empty on a CPU.
    """
    if clock.device.type != "cuda":
        return {}
    clock.wait()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        run(step, 1)
        clock.wait()
    spent: dict[str, float] = {}
    for event in profiler.events():
        if event.device_type != DeviceType.CUDA:  # the host's calls
            continue
        name = event.name[:NAME]
        spent[name] = spent.get(name, 0.0) + event.time_range.elapsed_us() / 1e3
    longest = sorted(spent, key=lambda name: -spent[name])
    named = [name for at, name in enumerate(longest) if at < MOST_NAMED or ours(name)]
    rest = sum(ms for name, ms in spent.items() if name not in named)
    return {name: round(spent[name], 3) for name in named} | {"rest": round(rest, 3)}


def run(steps: Sequence[Callable[[], Any]], calls: int) -> None:
    for _ in range(calls):
        for step in steps:
            step()


def ours(name: str) -> bool:
    """Our kernels are extern "C"; on a CPU an operator takes a kernel's place."""
    kernels = ("rewrite_read", "parameters_bwd", "reduce", "expand")
    return name.startswith((*kernels, "ddl::"))
