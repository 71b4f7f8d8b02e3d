"""One call of a day on a GPU, which may end at any moment: what is known is on disk.

    python benchmarks/gpu 1                     # tests and sanitizer
    python benchmarks/gpu 2 --out FOLDER        # operators, into FOLDER/gpu-2.jsonl
    python benchmarks/gpu 3 --only plans
    python benchmarks/gpu 3 --device cpu        # the same code where there is no GPU, in small
    python benchmarks/gpu prepare --device cpu --minutes 20     # compiles calls 2 and 3 ahead
    python benchmarks/gpu show FILE …           # the tables of such files

calls.py lists the parts of each call. Nothing is timed before it agrees with ddl.reference or plain
PyTorch on the device, at the sizes to be timed. What fails is recorded and the call continues; the
last line says what failed and what was not run. Exit status 1 means that something failed.
"""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path

from ddl.lab.bench import jsonl
from ddl.lab.bench.tables import progress
from gpu import report
from gpu.calls import parts
from gpu.log import Budget, Log, faults
from gpu.work import Workers

RESULTS = Path(__file__).resolve().parents[1] / "results"
NEEDS_GPU = ("capture", "large", "sanitize", "counters")


def main(arguments: Sequence[str] | None = None) -> int:
    args = parse(arguments)
    if args.call == "show":
        lines = [line for file in args.files for line in jsonl.read(file)]
        report.show(lines)
        print(report.last_line(f"{len(lines)} records", lines))
        return 0
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # to print what there is
    path = args.out / f"gpu-{args.call}.jsonl"
    log = Log(path)
    workers = Workers(args.device, ahead=args.device == "cuda")
    try:
        run(args, log, workers)
    finally:
        workers.close()
        progress("")
        report.show(log.lines)
        print(report.last_line(f"call {args.call}: {len(log.lines)} records in {path}", log.lines))
    return 1 if faults(log.lines) else 0


def run(args: argparse.Namespace, log: Log, workers: Workers) -> None:
    folder = args.authors and str(args.authors.resolve())
    every = parts(args.call, args.device, workers, args.commit, folder)
    chosen = [part for part in every if not args.only or part.name in ("machine", *args.only)]
    budget = Budget(args.minutes, sum(part.seconds for part in chosen))
    for part in chosen:
        if part.name in NEEDS_GPU and args.device != "cuda":
            log.write(part.name, what="all", skipped="needs a GPU")
            continue
        budget.run(log, replace(part, pieces=list(islice(part.pieces, args.pieces))))
        print(f"{part.name}: done after {budget.spent:.0f} s", flush=True)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("call", choices=("1", "2", "3", "prepare", "show"))
    parser.add_argument("files", nargs="*", type=Path, help="of `show`")
    parser.add_argument("--device", choices=("cuda", "emulated", "cpu"), default="cuda")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder (benchmarks/results)")
    parser.add_argument("--only", type=lambda text: text.split(","), help="parts, by commas")
    parser.add_argument("--pieces", type=int, help="at most so many pieces of each part")
    parser.add_argument("--minutes", type=float, default=6.5, help="for everything (6.5)")
    parser.add_argument(
        "--commit", help="commit that the wheel was built from, if this is no repository"
    )
    parser.add_argument(
        "--authors", type=Path, metavar="FOLDER", help="clone of the authors' code, to time beside"
    )
    args = parser.parse_args(arguments)
    if args.only:
        names = [part.name for part in parts(args.call, args.device, NO_WORKERS, None)]
        for part in args.only:
            if part not in names:
                parser.error(f"--only must name parts, which are {', '.join(names)}, got {part!r}")
    return args


NO_WORKERS = Workers("cpu", ahead=False)  # to name parts; it starts none
