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
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from common import record
from common.arguments import make_parser, parse
from ddl import functional
from ddl.lab.bench.clock import Clock
from ddl.lab.bench.ops import time_forms
from ddl.lab.bench.problems import LONGEST, OPS, TAPS, Case, forms_of
from ddl.lab.bench.tables import Table

GOAL = 0.85  # of the copy's rate


FULL = {
    "sizes": [384, 768, 1024, 2048, 4096],  # d
    "channels": [1, 4, 16],  # m
    "rewrites": [1, 2, 4],  # n, of rewrite_read
    "megabytes": 25.0,  # of a state
    "rounds": 15,
    "threads": 2,
}
QUICK = FULL | {"sizes": [96], "megabytes": 0.1, "rounds": 3}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = make_parser(__doc__)
    parser.add_argument("--ops", nargs="+", choices=OPS, default=list(OPS))
    args = parse(parser, arguments, full=FULL, quick=QUICK)
    torch.set_num_threads(args.threads)
    where = record.environment()
    results = [measure(case, args.rounds) for case in cases(args)]
    config = {name: getattr(args, name) for name in ("megabytes", "rounds", "quick")}
    run = {"benchmark": "ops", "config": config | {"dtype": "float32"}, "results": results}
    record.publish("ops", where, run, tabulate(results, args), args.out)
    return 1 if any(result["gate"]["red"] for result in results) else 0


def cases(args: argparse.Namespace) -> Iterator[Case]:
    """All cases, each with the number of tokens that makes its state --megabytes large."""
    for op, m, d in itertools.product(args.ops, args.channels, args.sizes):
        tokens = max(TAPS, round(args.megabytes * 1e6 / (4 * d * m)))
        batch = math.ceil(tokens / LONGEST)
        for form, n in itertools.product(forms_of(op, m), args.rewrites):
            if n == 1 or op == "rewrite_read":
                yield Case(op, form, d, m, batch, tokens // batch, rewrites=n)


def measure(case: Case, rounds: int) -> dict[str, Any]:
    """The results of one case as JSON types; the copies are of its state."""
    state_bytes = case.batch * case.time * case.d * case.m * case.state.itemsize
    clock = Clock(torch.device("cpu"), state_bytes)
    (form,) = time_forms(case, {"fused": getattr(functional, case.op)}, clock, rounds).values()
    return {**case.sizes(), "state_bytes": state_bytes, **form.to_json()}


def tabulate(results: list[dict[str, Any]], args: argparse.Namespace) -> Table:
    table = Table(
        f"Operators: float32, states of {args.megabytes:g} MB, {args.threads} threads; "
        "GB/s, and percent of the copy",
        ("operator", "form", "d", "m", "n", "tokens", "forward", "% copy", "backward", "% copy",
         "copy"),
        labels=2,
    )  # fmt: skip
    shares = []
    for r in results:
        cells = [r["op"], r["form"], f"{r['d']}", f"{r['m']}", f"{r['rewrites']}"]
        cells.append(f"{r['batch'] * r['time']}")
        if r["gate"]["red"]:
            table.add(*cells, "RED", *[""] * 4)
            table.notes.append(f"RED, not timed: {r['op']} {r['form']}: {r['gate']['red']}")
            continue
        copy = r["copy"]["gb_s"]
        for half in ("forward", "backward"):
            rate = r[half]["gb_s"]
            shares.append(rate / copy)
            cells += [f"{rate:.1f}", f"{rate / copy:.0%}"]
        table.add(*cells, f"{copy:.1f}")
    if shares:
        reached = sum(share >= GOAL for share in shares)
        table.notes.append(
            f"{reached} of {len(shares)} reach {GOAL:.0%} of copy; lowest {min(shares):.0%}, "
            f"median {statistics.median(shares):.0%}. All rates count bytes read and "
            f"written, at the median of {args.rounds} interleaved rounds."
        )
    return table


if __name__ == "__main__":
    gc.freeze()  # imported modules are no garbage, and every gc.collect() would visit them again
    sys.exit(main())
