"""Launch overhead: the host's time per call when there is almost nothing to compute."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from ddl import functional
from ddl.lab.bench.clock import Clock
from ddl.lab.bench.measure import Timed, interleave
from ddl.lab.bench.problems import Case, Operator, Problem, build, cotangents
from gpu.log import Line

FORMS = {"rewrite_read": "channel", "rewrite": "", "read": "channel", "expand": "conv"}
D, M, TOKENS = 64, 4, 8
BF16 = torch.bfloat16


def launches(clock: Clock, calls: int, rounds: int) -> list[Line]:
    """Microseconds per call: without autograd, under autograd, and with the backward.

    The host does not wait for the device between calls. PyTorch's own addition and RMS norm are
    timed in the same rounds, to compare with.
    """
    x = torch.randn(1, TOKENS, D, device=clock.device, dtype=BF16)
    weight = torch.ones(D, device=clock.device, dtype=BF16)
    steps: dict[tuple[str, str], Callable[[], Any]] = {
        ("add", "torch"): lambda: x + x,
        ("rms_norm", "torch"): lambda: F.rms_norm(x, (D,), weight),
    }
    for op in FORMS:
        steps |= {(op, kind): call for kind, call in calls_of(op, clock.device).items()}
    timed = {" ".join(key): host_time(call, calls, clock) for key, call in steps.items()}
    seconds = interleave(timed, rounds, what="launch")
    return [
        {
            "what": f"{op} {kind}",
            "op": op,
            "kind": kind,
            "us": 1e6 * statistics.median(taken for (taken,) in seconds[f"{op} {kind}"]),
        }
        for op, kind in steps
    ]


def calls_of(op: str, device: torch.device) -> dict[str, Callable[[], Any]]:
    """The three ways to call an operator on a few tokens."""
    problem = build(Case(op, FORMS[op], D, M, 1, TOKENS, BF16, BF16), device)
    return ways(problem, getattr(functional, op))


def ways(problem: Problem, function: Operator) -> dict[str, Callable[[], Any]]:
    """A call without autograd, one under it, and one with its backward."""
    incoming = cotangents(problem.outputs(function))

    def without_autograd() -> Any:
        with torch.no_grad():
            return problem.outputs(function)

    def forward() -> Any:
        return problem.outputs(function)

    def both() -> Any:
        return torch.autograd.grad(problem.outputs(function), problem.leaves, incoming)

    return {"no grad": without_autograd, "forward": forward, "forward + backward": both}


def host_time(call: Callable[[], Any], calls: int, clock: Clock) -> Timed:
    """Seconds of the host per call."""

    def run() -> tuple[float, ...]:
        clock.wait()
        started = time.perf_counter()
        for _ in range(calls):
            call()
        elapsed = time.perf_counter() - started
        clock.wait()
        return (elapsed / calls,)

    return run
