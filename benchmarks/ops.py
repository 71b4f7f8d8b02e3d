"""GB/s of every operator, forward and backward, against a copy measured in the same rounds.

    python benchmarks/ops.py            # all sizes: minutes
    python benchmarks/ops.py --quick    # the same path in small: seconds, recorded nowhere

ddl/lab/bench/traffic.py says which bytes are counted. Every call allocates its outputs, as in
training. First the outputs and gradients of each case must agree with `ddl.reference`. A case that
fails is reported red, without times, and the exit status is 1.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import math
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from common import record
from common.floor import copies
from ddl import functional
from ddl.lab.bench.measure import MismatchError, Timed, gb_per_second, interleave
from ddl.lab.bench.problems import (
    LONGEST,
    OPS,
    TAPS,
    Case,
    Problem,
    build,
    check,
    cotangents,
    forms_of,
)
from ddl.lab.bench.tables import Table

GOAL = 0.85  # of the copy's rate


def main(arguments: Sequence[str] | None = None) -> int:
    args = parse(arguments)
    torch.set_num_threads(args.threads)
    where = record.environment()
    results = [measure(case, args.rounds) for case in cases(args)]
    table = tabulate(results, args)
    table.show()
    print(record.describe(where))
    if args.out is not None:
        config = {name: getattr(args, name) for name in ("megabytes", "rounds", "quick")}
        run = {"benchmark": "ops", "config": config | {"dtype": "float32"}, "results": results}
        summary = f"{table.markdown()}\n{record.describe(where)}\n"
        record.write("ops", where | run, summary, args.out)
    return 1 if any(result["gate"]["red"] for result in results) else 0


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ops", nargs="+", choices=OPS, default=list(OPS))
    parser.add_argument("--sizes", nargs="+", type=int, help="values of d")
    parser.add_argument("--channels", nargs="+", type=int, default=[1, 4, 16], help="values of m")
    parser.add_argument(
        "--rewrites", nargs="+", type=int, default=[1, 2, 4], help="values of n, of rewrite_read"
    )
    parser.add_argument("--megabytes", type=float, help="of a state (25, quick: 0.1)")
    parser.add_argument("--rounds", type=int, help="calls of each that are timed (15, quick: 3)")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--quick", action="store_true", help="small states, few rounds")
    parser.add_argument("--out", type=Path, help="folder of the records (benchmarks/results)")
    args = parser.parse_args(arguments)
    small = {"sizes": [96], "megabytes": 0.1, "rounds": 3}
    full = {"sizes": [384, 768, 1024, 2048, 4096], "megabytes": 25.0, "rounds": 15}
    for name, value in (small if args.quick else full).items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    if (
        min(*args.sizes, *args.channels, *args.rewrites, args.rounds, args.megabytes, args.threads)
        <= 0
    ):
        parser.error("sizes, channels, rewrites, megabytes, rounds and threads must be positive")
    if args.out is None and not args.quick:
        args.out = record.RESULTS
    return args


def cases(args: argparse.Namespace) -> Iterator[Case]:
    """All cases, each with the number of tokens that makes its state --megabytes large."""
    for op, m, d in itertools.product(args.ops, args.channels, args.sizes):
        tokens = max(TAPS, round(args.megabytes * 1e6 / (4 * d * m)))
        batch = math.ceil(tokens / LONGEST)
        for form, n in itertools.product(forms_of(op, m), args.rewrites):
            if n == 1 or op == "rewrite_read":
                yield Case(op, form, d, m, batch, tokens // batch, rewrites=n)


def stopwatch(case: Case, problem: Problem) -> Timed:
    """Times one forward call under autograd, and its backward."""
    op, leaves = getattr(functional, case.op), problem.leaves
    incoming = cotangents(problem.outputs(op))

    def run() -> tuple[float, ...]:
        started = time.perf_counter()
        outputs = problem.outputs(op)
        between = time.perf_counter()
        grads = torch.autograd.grad(outputs, leaves, incoming)
        ended = time.perf_counter()
        del outputs, grads  # only after the clock stopped
        return between - started, ended - between

    return run


def measure(case: Case, rounds: int) -> dict[str, Any]:
    """The results of one case as JSON types."""
    problem = build(case)
    result: dict[str, Any] = {
        **case.sizes(),
        "state_bytes": problem.state.nbytes,
        "gate": {"red": None, "worst": None},  # worst: the largest error divided by its tolerance
    }
    try:
        result["gate"]["worst"] = check(case, problem, getattr(functional, case.op))
    except MismatchError as difference:
        result["gate"]["red"] = str(difference)
        return result
    steps = {"op": stopwatch(case, problem)} | copies(problem.state)
    seconds = interleave(steps, rounds, what=case.name)
    forward, backward = (list(column) for column in zip(*seconds["op"], strict=True))
    for name, moved, taken in [
        ("forward", problem.forward_bytes, forward),
        ("backward", problem.backward_bytes, backward),
        *(
            (name, 2 * problem.state.nbytes, [took for (took,) in seconds[name]])
            for name in ("copy", "clone")
        ),
    ]:
        rate = gb_per_second(moved, taken)
        median = statistics.median(taken)
        result[name] = {"bytes": moved, "gb_s": rate, "median": median, "seconds": taken}
    return result


def tabulate(results: list[dict[str, Any]], args: argparse.Namespace) -> Table:
    table = Table(
        f"Operators: float32, states of {args.megabytes:g} MB, {args.threads} threads; "
        "GB/s, and percent of the copy",
        ("operator", "form", "d", "m", "n", "tokens", "forward", "% copy", "% clone", "backward",
         "% copy", "% clone", "copy", "clone"),
        labels=2,
    )  # fmt: skip
    shares = []
    for r in results:
        cells = [r["op"], r["form"], f"{r['d']}", f"{r['m']}", f"{r['rewrites']}"]
        cells.append(f"{r['batch'] * r['time']}")
        if r["gate"]["red"]:
            table.add(*cells, "RED", *[""] * 7)
            table.notes.append(f"RED, not timed: {r['op']} {r['form']}: {r['gate']['red']}")
            continue
        copy, clone = r["copy"]["gb_s"], r["clone"]["gb_s"]
        for half in ("forward", "backward"):
            rate = r[half]["gb_s"]
            shares.append(rate / copy)
            cells += [f"{rate:.1f}", f"{rate / copy:.0%}", f"{rate / clone:.0%}"]
        table.add(*cells, f"{copy:.1f}", f"{clone:.1f}")
    if shares:
        reached = sum(share >= GOAL for share in shares)
        table.notes.append(
            f"{reached} of {len(shares)} reach {GOAL:.0%} of copy; lowest {min(shares):.0%}, "
            f"median {statistics.median(shares):.0%}. copy: copy_ between two tensors; clone: into "
            "fresh memory, as the operators write. All rates count bytes read and written, at the "
            f"median of {args.rounds} interleaved rounds."
        )
    return table


if __name__ == "__main__":
    gc.freeze()  # imported modules are no garbage, and every gc.collect() would visit them again
    sys.exit(main())
