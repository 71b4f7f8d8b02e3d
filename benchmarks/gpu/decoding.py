"""Milliseconds per generated token: CUDA graphs of `GPT.generate`, and its steps without them."""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median

from ddl.lab.bench.clock import Clock
from ddl.lab.bench.measure import Timed, interleave
from ddl.models import GPT
from gpu.log import Line
from gpu.steps import make, random_tokens


def decode(clock: Clock, cases: list[Line], sizes: Line, tokens: int, rounds: int) -> list[Line]:
    """One sequence of each residual, in turns. A capture counts: its time is one of all tokens'."""
    models = [make(case, sizes, clock.device).eval() for case in cases]
    runs: dict[str, Timed] = {}
    for number, model in enumerate(models):
        runs |= {f"graph {number}": stopwatch(clock, model, tokens)}
        runs |= {f"eager {number}": watched(model, stopwatch(clock, model, tokens))}
    taken = interleave(runs, rounds, warmup=1, what="decode")
    typical = {name: median(seconds for (seconds,) in rows) for name, rows in taken.items()}
    lines = []
    for name, seconds in typical.items():
        mode, number = name.split()
        eager, additive = typical[f"eager {number}"], typical[f"{mode} 0"]
        line = {"mode": mode, "ms": 1e3 * seconds / tokens, "times_eager": eager / seconds}
        lines.append(cases[int(number)] | line | {"ratio": additive / seconds})
    return lines


def stopwatch(clock: Clock, model: GPT, tokens: int) -> Timed:
    """Times a generation after a prompt of one token."""
    prompt = random_tokens(model, 1, clock.device)[:, :1]

    def run() -> tuple[float, ...]:
        clock.wait()
        start = time.perf_counter()
        model.generate(prompt, tokens, temperature=0)
        clock.wait()
        return (time.perf_counter() - start,)

    return run


def watched(model: GPT, run: Callable[[], tuple[float, ...]]) -> Timed:
    """The same with a hook, without which a step would be captured."""

    def observed() -> tuple[float, ...]:
        hook = model.wte.register_forward_hook(lambda *_: None)
        try:
            return run()
        finally:
            hook.remove()

    return observed
