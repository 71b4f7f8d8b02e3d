"""Train the runs of sweeps in processes side by side, and keep their records.

    python -m study.side_by_side tuning main --processes 14     # into study/records/tuning.jsonl, …

Models as small as the study's leave most of a GPU or of many cores idle. A run that has a record is
not trained again. What is not done after `--minutes` is left to the next call.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Iterable
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from functools import cache, partial
from multiprocessing import get_context
from pathlib import Path
from typing import NamedTuple

import torch
from rich.console import Console

from ddl.lab.config.sweeps import Sweep, read_sweep
from ddl.lab.train.sweep import duration, train_sweep

from . import graphed, records
from .collect import collect
from .records import Record

HERE = Path(__file__).parent


class Job(NamedTuple):
    """A run: its name, the file of its record, and the work that makes the record."""

    name: str
    out: Path
    work: Callable[[], Record]


def of_sweep(file: Path, out: Path) -> list[Job]:
    """The runs of a sweep."""
    sweep = read_sweep(file)
    return [Job(run.name, out, partial(train_run, sweep, at)) for at, run in enumerate(sweep.runs)]


def train_run(sweep: Sweep, index: int) -> Record:
    """Train a run of a sweep to its end, and make its record."""
    with Path(os.devnull).open("w") as nowhere:
        swept = train_sweep(sweep, Console(file=nowhere), index=index)
    record = collect(sweep.runs[index].config.out)
    if record is None:
        raise RuntimeError("; ".join(swept.failed.values()) or "stopped")
    return record


def run(plan: Callable[[], Iterable[Job]], processes: int, seconds: float) -> int:
    """Do the jobs of a plan that have no record. Returns how many failed or were left.

    plan: called again after every record, because some jobs can only be planned then.
    """
    begun = time.monotonic()
    started: dict[tuple[Path, str], Future[Record]] = {}
    running: dict[Future[Record], Job] = {}
    done = failed = 0
    pool = ProcessPoolExecutor(processes, get_context("spawn"), initializer=prepare)
    while True:
        kept = cache(records.by_name)
        for job in plan():
            if (job.out, job.name) not in started and job.name not in kept(job.out):
                started[job.out, job.name] = future = pool.submit(job.work)
                running[future] = job
        left = begun + seconds - time.monotonic()
        if not running or left <= 0:
            break
        for future in wait(running, timeout=left, return_when=FIRST_COMPLETED).done:
            job = running.pop(future)
            if (error := future.exception()) is not None:
                failed += 1
                print(f"{job.name} failed: {error}", flush=True)
                continue
            done += 1
            record = future.result()
            records.keep(job.out, record)
            pace = (time.monotonic() - begun) / done
            rest = duration(pace * len(running)) if running else "nothing"
            print(f"{job.name}: {told(record)}{rest} to go", flush=True)
    if running:
        print(f"left: {len(running)}", flush=True)
        for process in list(pool._processes.values()):
            process.kill()
    pool.shutdown(wait=not running, cancel_futures=True)
    return failed + len(running)


def told(record: Record) -> str:
    """What a line of progress says of a record, with what divides it from the rest."""
    scores = (f"{key} {record[key]:.4f}" for key in ("loss", "accuracy") if key in record)
    return "; ".join([*scores, ""])


def prepare() -> None:
    """Prepare a process of the pool: one thread, and graphs on a GPU."""
    torch.set_num_threads(1)
    graphed.install()


def arguments_of(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `run`."""
    parser.add_argument("--processes", type=int, default=1, help="runs side by side (1)")
    parser.add_argument("--minutes", type=float, default=1e6, help="until no run is begun or ended")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("sweeps", nargs="+", help="names of files in study/, without .toml")
    parser.add_argument("--records", type=Path, default=records.FOLDER, help="where to keep them")
    arguments_of(parser)
    args = parser.parse_args(arguments)
    jobs = [
        job
        for name in args.sweeps
        for job in of_sweep(HERE / f"{name}.toml", args.records / f"{name}.jsonl")
    ]
    return 1 if run(lambda: jobs, args.processes, 60 * args.minutes) else 0


if __name__ == "__main__":
    sys.exit(main())
