"""`ddl bench`."""

from __future__ import annotations

import json
import sys

from ddl.lab.config import BenchConfig

from .command import Command, parse

HELP = """Measure this installation on this machine: operators, blocks, models and norms, each
against its baseline in the same rounds. A time is reported only if the result agreed with
ddl.reference in the same run.

ddl bench

ddl bench ops norm --device cuda --dtype bfloat16

To see whether a new version is slower, record one run and compare the next one with it; the exit
status is 1 if a row is slower than allowed, or wrong:

ddl bench --out before.jsonl

ddl bench --baseline before.jsonl --min-ratio 0.9 --max-p95 1.2

All of it takes about a minute on two cores."""


def run(args: list[str]) -> int:
    config = parse(BenchConfig, args, prog="ddl bench", description=HELP, positional=True)
    from ddl.lab.bench.record import describe
    from ddl.lab.bench.run import bench, tabulate

    done = bench(config)
    if config.json:
        print(json.dumps(done.to_json()))
        return 1 if done.failed else 0
    tabulate(done.record).show()
    print(describe(done.record))
    for sentence in done.notes:
        print(f"note: {sentence}")
    for sentence in done.failed:
        print(f"ddl bench: {sentence}", file=sys.stderr)
    if config.out is not None:
        print(f"wrote {config.out}")
    return 1 if done.failed else 0


COMMAND = Command("measure this machine: ddl bench [ops blocks models norm]", BenchConfig, run)
