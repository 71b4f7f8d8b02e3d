"""The pieces of a call: jobs in worker processes, and commands. None can take the call with it.

Only these processes touch the device, each for one piece, because an illegal access leaves a CUDA
context unusable. One that hangs is killed.
"""

from __future__ import annotations

import contextlib
import csv
import io
import multiprocessing
import os
import re
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from gpu.log import Line, PieceError
from gpu.worker import die_with_parent, serve

LIMIT = 60.0  # seconds of a piece, unless it has a limit of its own
# A process that has imported torch, and never uses the device, forks all workers.
FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["gpu.ahead"])
MOST_WORKERS = 12  # each has a CUDA context; the cores compile kernels
RESULT = re.compile(r"^\[gw\d+\] \[ *\d+%\] ([A-Z]+) (\S+::.*?)\s*$", re.MULTILINE)
REASON = re.compile(r"^(?:FAILED|ERROR) (\S+::.*?) - (.*)$", re.MULTILINE)
KEPT = re.compile("duration|wavefronts|stalled|issue_active|throughput.*pct|dram|conflicts|occup")
SECTIONS = ("SpeedOfLight", "MemoryWorkloadAnalysis", "WarpStateStats", "Occupancy", "LaunchStats")


class Worker:
    """A process that does the jobs of worker.py."""

    def __init__(self, device: str) -> None:
        self.pipe, end = FORKS.Pipe()
        self.process = FORKS.Process(target=serve, args=(end, device), daemon=True)
        self.process.start()
        end.close()

    def send(self, job: str, arguments: Line, plan: str = "") -> None:
        """Give the worker a job; `answers` has its lines."""
        with contextlib.suppress(BrokenPipeError):
            self.pipe.send((job, arguments, plan))

    def answers(self, limit: float) -> Iterator[Line]:
        """Lines of the job that was sent first. After a PieceError the worker is of no use."""
        deadline = time.monotonic() + limit
        while True:
            if not self.pipe.poll(max(0.0, deadline - time.monotonic())):
                raise PieceError(f"killed, no result after {limit:.0f} s")
            try:
                line, error = self.pipe.recv()
            except (EOFError, ConnectionError):
                self.process.join(5)
                raise PieceError(f"the process died, status {self.process.exitcode}") from None
            if error is not None:
                raise PieceError(error)
            if line is None:
                return
            yield line

    def close(self) -> None:
        self.process.kill()
        self.process.join(5)  # one that waits for a dead device does not end
        self.pipe.close()


@dataclass
class Job:
    """A job of worker.py, in a process of its own."""

    name: str
    job: str
    device: str
    arguments: Line
    plan: str = ""  # DDL_PLAN
    limit: float = LIMIT

    def lines(self, limit: float) -> Iterator[Line]:
        with contextlib.closing(Worker(self.device)) as worker:
            worker.send(self.job, self.arguments, self.plan)
            for line in worker.answers(limit):
                yield line | ({"plan": self.plan} if self.plan else {})


@dataclass
class Command:
    """A command, and a reader of its output and exit status, which is None if it was killed."""

    name: str
    command: Sequence[str]
    read: Callable[[str, int | None], list[Line]]
    limit: float = LIMIT

    def lines(self, limit: float) -> Iterator[Line]:
        kill_all = ["timeout", "--signal=KILL", f"{max(1.0, limit):.0f}"]  # its children, too
        done = subprocess.run(
            [*kill_all, *self.command],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            env=os.environ | {"PYTHONUNBUFFERED": "1", "COLUMNS": "300"},
            preexec_fn=die_with_parent,
            check=False,
        )
        killed = done.returncode in (-9, 137)
        for line in self.read(done.stdout, None if killed else done.returncode):
            yield {"what": self.name} | line
        if killed:
            raise PieceError(f"killed, not done after {limit:.0f} s")


def pytest(file: Path, words: str) -> Command:
    """The tests of a file that have these words, in several processes."""
    command = [sys.executable, "-m", "pytest", "-v", "--tb=short", "-p", "no:cacheprovider"]
    command += ["-n", str(min(MOST_WORKERS, os.cpu_count() or 1)), "--all", "-k", words, str(file)]
    return Command(f"{file.stem}: {words}", command, read_pytest, limit=200)


def read_pytest(text: str, status: int | None) -> list[Line]:
    """A record of every failure, and the counts at the end."""
    results, reasons = RESULT.findall(text), dict(REASON.findall(text))
    counts = Counter(outcome.lower() for outcome, _ in results)
    line: Line = {"tests": dict(counts), "status": status}
    if status and not counts.keys() & {"failed", "error"}:
        line["error"] = f"status {status}: {' | '.join(text.splitlines()[-3:])}"
    elif status == 0 and not counts["passed"]:
        line["skipped"] = f"no test ran, {counts['skipped']} were skipped"
    failed = [test for outcome, test in results if outcome in ("FAILED", "ERROR")]
    return [*({"what": x, "error": reasons.get(x, "failed")} for x in failed), line]


def counters(name: str, case: Line, kernel: str) -> Command:
    """Hardware counters of the first launch of a kernel. The clocks are left as they are."""
    tool = shutil.which("ncu", path=f"{os.environ.get('PATH', '')}:/usr/local/cuda/bin") or "ncu"
    command = [tool, "--clock-control", "none", "--csv", "--page", "raw"]
    command += [f"--section={section}" for section in SECTIONS]
    command += ["--kernel-name", kernel, "--launch-count", "1", sys.executable, "-c"]
    job = f"print(*run('cuda', 'operators', {{'case': {case}, 'rounds': 0}}))"
    command.append(f"from gpu.worker import run; {job}")
    return Command(f"{name} {kernel}", command, read_counters)


def read_counters(text: str, status: int | None) -> list[Line]:
    """The metrics of a launch, in Nsight Compute's CSV, that say for what it waits."""
    table = "\n".join(line for line in text.splitlines() if line.startswith('"'))
    rows = list(csv.reader(io.StringIO(table)))
    if len(rows) < 3:  # names, units, a launch
        errors = [line for line in text.splitlines() if line.startswith("==ERROR==")]
        reason = next(iter(errors), f"status {status}")
        return [{"skipped": f"Nsight Compute gave no counters: {reason}"}]
    columns = [x for x in zip(*rows[:3], strict=True) if KEPT.search(x[0])]
    return [{"metrics": {name: f"{value} {unit}".strip() for name, unit, value in columns}}]
