"""The cost of calling an operator: `rewrite_read` on tensors so small that only the call is timed.

    python benchmarks/call_overhead.py            # half a minute
    python benchmarks/call_overhead.py --save     # and benchmarks/results/call_overhead.{jsonl,md}

Every time is a ratio to `torch.nn.functional.rms_norm` without gradients in the same rounds, on one
thread. "recorded" runs with autograd. "with backward" also takes the gradients of the context
alone, as a sublayer does; "all outputs" those of all four, for which torch first prepares four
gradients. rms_norm's own rows show what torch's autograd costs for one output and two inputs.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F

from common import record
from ddl import functional, reference
from ddl.lab.bench.measure import Timed, compare, interleave, ratio, ratio_interval
from ddl.lab.bench.tables import Table

SHAPE = {"tokens": 2, "d": 8, "m": 4}
CALLS = 200  # in a row
BASE = "rms_norm"
GOALS = {"no grad": 1.5, "recorded": 3.0, "with backward": 11.0}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=41)
    parser.add_argument("--save", action="store_true", help="write the record and the table")
    args = parser.parse_args(arguments)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    where = record.environment()
    given = tensors()
    check(given)
    seconds = {
        name: [taken for (taken,) in rounds]
        for name, rounds in interleave(calls(given), args.rounds, what="calls").items()
    }
    table = Table(
        "A call of rewrite_read: {tokens} tokens, d {d}, m {m}, all outputs, 1 thread".format(
            **SHAPE
        ),
        ("call", "µs", f"× {BASE}", "95 %", "goal"),
    )
    for name, taken in seconds.items():
        low, high = ratio_interval(taken, seconds[BASE])
        median = 1e6 * sorted(taken)[len(taken) // 2]
        times = f"{ratio(taken, seconds[BASE]):.2f}"
        goal = f"≤ {GOALS[name]:g}" if name in GOALS else ""
        table.add(name, f"{median:.1f}", times, f"{low:.2f}–{high:.2f}", goal)
    table.show()
    print(record.describe(where))
    if args.save:
        text = f"{table.markdown()}\n\n{record.describe(where)}\n"
        record.write("call_overhead", where | {"seconds": seconds}, text, record.RESULTS)
    return 0


def tensors() -> dict[str, torch.Tensor]:
    """Arguments of a rewrite_read with every part of a channel read."""
    tokens, d, m = SHAPE["tokens"], SHAPE["d"], SHAPE["m"]
    shapes: dict[str, tuple[int, ...]] = {
        "state": (tokens, d, m), "direction": (tokens, d), "value": (tokens, m), "gate": (tokens,),
        "compress": (d, m), "norm_weight": (d,), "gate_weight": (d,), "gate_bias": (),
        "value_weight": (m, d), "value_bias": (m,),
    }  # fmt: skip
    return {name: torch.randn(shape) for name, shape in shapes.items()}


def outputs_and_gradients(module: Any, given: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    leaves = {name: tensor.clone().requires_grad_() for name, tensor in given.items()}
    outputs = module.rewrite_read(**leaves, eps_k=0.1)
    gradients = torch.autograd.grad([output.sum() for output in outputs], list(leaves.values()))
    named = dict(zip(outputs._fields, outputs, strict=True))
    return named | {f"grad_{name}": grad for name, grad in zip(leaves, gradients, strict=True)}


def check(given: dict[str, torch.Tensor]) -> None:
    """Compare outputs and gradients with the reference before anything is timed."""
    actual, expected = (outputs_and_gradients(module, given) for module in (functional, reference))
    compare({name: (actual[name], expected[name]) for name in expected}, 1e-5)


def calls(given: dict[str, torch.Tensor]) -> dict[str, Timed]:
    x, weight = given["direction"], given["norm_weight"]
    leaves = {name: tensor.clone().requires_grad_() for name, tensor in given.items()}
    norm_leaves = [leaves["direction"], leaves["norm_weight"]]
    incoming = [torch.randn_like(output) for output in functional.rewrite_read(**leaves, eps_k=0.1)]

    def rms_norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, x.shape[-1:], weight, 1e-5)

    def rms_norm_backward() -> None:
        torch.autograd.grad(rms_norm(*norm_leaves), norm_leaves, x)

    wanted = list(leaves.values())

    def backward() -> None:
        context = functional.rewrite_read(**leaves, eps_k=0.1).context
        torch.autograd.grad(context, wanted, incoming[1], allow_unused=True)

    def backward_of_all() -> None:
        outputs = functional.rewrite_read(**leaves, eps_k=0.1)
        torch.autograd.grad(list(outputs), wanted, incoming)

    return {
        BASE: stopwatch(lambda: rms_norm(x, weight)),
        "no grad": stopwatch(lambda: functional.rewrite_read(**given, eps_k=0.1)),
        "recorded": stopwatch(lambda: functional.rewrite_read(**leaves, eps_k=0.1)),
        "with backward": stopwatch(backward),
        "with backward, all outputs": stopwatch(backward_of_all),
        f"{BASE}, recorded": stopwatch(lambda: rms_norm(*norm_leaves)),
        f"{BASE}, with backward": stopwatch(rms_norm_backward),
    }


def stopwatch(call: Callable[[], object]) -> Timed:
    def timed() -> tuple[float]:
        start = time.perf_counter()
        for _ in range(CALLS):
            call()
        return ((time.perf_counter() - start) / CALLS,)

    return timed


if __name__ == "__main__":
    sys.exit(main())
