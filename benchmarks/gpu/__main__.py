"""One call of a day on a GPU, which may end at any moment: its records are on disk.

    benchmarks/gpu/day.sh day                     # into benchmarks/results/gpu-day.jsonl
    benchmarks/gpu/day.sh tests --out FOLDER      # into FOLDER/gpu-tests.jsonl
    benchmarks/gpu/day.sh day --device cpu        # the same code where there is no GPU, in small
    benchmarks/gpu/day.sh show FILE …             # the tables of such files
    benchmarks/gpu/day.sh table                   # the planner's table of plans, from the records

day.py lists the parts of each call. Nothing is timed before it agrees with ddl.reference or plain
PyTorch on the device. The call continues after a failure, and ends with exit status 1.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from ddl.lab.bench import jsonl
from ddl.lab.bench.tables import progress
from gpu import day, plans, tables
from gpu.log import Log, fault
from gpu.rounds import Crew, Rounds

RESULTS = plans.RESULTS
NEEDS_GPU = ("roof", "counters")


def main(arguments: Sequence[str] | None = None) -> int:
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("day.sh", description=__doc__, formatter_class=formatter)
    parser.add_argument("call", choices=("day", "tests", "prepare", "show", "table"))
    parser.add_argument("files", nargs="*", type=Path, help="of `show`")
    parser.add_argument("--device", choices=("cuda", "emulated", "cpu"), default="cuda")
    parser.add_argument(
        "--out", type=Path, default=plans.RESULTS, help="folder (benchmarks/results)"
    )
    parser.add_argument("--only", type=lambda text: text.split(","), help="parts, by commas")
    parser.add_argument("--minutes", type=float, help="for everything")
    parser.add_argument("--commit", help="that the wheel was built from, if this is no repository")
    args = parser.parse_args(arguments)
    if args.call == "show":
        lines = [line for file in args.files for line in jsonl.read(file)]
        tables.show(f"{len(lines)} records", lines)
        return 0
    if args.call == "table":
        plans.TABLE.write_text(plans.table(args.out), encoding="utf-8")
        return 0
    crew = Crew(args.device, day.sizes_of(args.device)["model"])
    parts = day.parts(args.call, args.device, crew, args.commit)
    names = [part.name for part in parts]
    if unknown := set(args.only or ()) - set(names):
        parser.error(f"--only must name parts among {', '.join(names)}, got {min(unknown)!r}")
    chosen = [part for part in parts if not args.only or part.name in ("machine", *args.only)]
    turns = [piece for part in chosen for piece in part.pieces if isinstance(piece, Rounds)]
    # The processes fill the cores.
    os.environ |= {"TORCHINDUCTOR_COMPILE_THREADS": "1", "OMP_NUM_THREADS": "1"}
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # to print the tables
    path = args.out / f"gpu-{args.call}.jsonl"
    log = Log(path, args.minutes or day.MINUTES[args.call])
    try:
        for case in [case for piece in turns for case in piece.cases]:
            crew.start(case)
        for part in parts:
            if part in chosen and part.name in NEEDS_GPU and args.device != "cuda":
                log.write(part.name, what="all", skipped="needs a GPU")
            elif part in chosen or (turns and part.name == "compiled"):
                log.run(part)
    finally:
        progress("")
        tables.show(f"{args.call}: {len(log.lines)} records in {path}", log.lines)
        crew.close()
    return int(any(map(fault, log.lines)))


if __name__ == "__main__":
    sys.exit(main())
