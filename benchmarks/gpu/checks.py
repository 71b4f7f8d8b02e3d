"""Commands that a call runs: pytest, compute-sanitizer and Nsight Compute, and what they print."""

from __future__ import annotations

import csv
import io
import json
import os
import re
import shutil
import sys
from pathlib import Path
from typing import Any

from gpu.log import Line
from gpu.work import START, Command

ROOT = Path(__file__).resolve().parents[2]
MOST_WORKERS = 12  # each has a CUDA context; the cores compile kernels
TOOLS = ("memcheck", "synccheck", "initcheck", "racecheck")  # the least certain last
# The smallest tests of each kind of kernel, clusters included; sanitize.py's own choice takes
# minutes with each tool.
SANITIZED = (
    "test_rewrite_read and bfloat16 and (1-identity-63 or 4-channel-384 or 4-token-384)"
    " or test_expand and 4-4-torch.float32 or test_unaligned_views and 63-- and bfloat16"
    " or test_wide_states and (4096-4-channel or 4096-4-token)"
)
VERBOSE = re.compile(
    r"^(?:\[gw\d+\] \[ *\d+%\] (?P<first>[A-Z]+) (?P<test>\S+::.*?)"
    r"|(?P<name>\S+::.*?) (?P<last>PASSED|FAILED|ERROR|SKIPPED|XFAIL)(?: .*)?)\s*$"
)
REASON = re.compile(r"^(?:FAILED|ERROR) (?P<test>\S.*?) - (?P<reason>.*)$")


class Pytest:
    """Reads pytest's verbose output: a record of every failure, and the counts at the end."""

    def __init__(self) -> None:
        self.counts: dict[str, int] = {}
        self.started: dict[str, None] = {}
        self.tail: list[str] = []

    def __call__(self, text: str | None, status: int | None) -> Line | None:
        if text is None:
            return self.end(status)
        self.tail = [*self.tail, text.strip()][-30:]
        found = VERBOSE.match(text)
        if found is None:
            if "::" in text and text.endswith(" ") and text.startswith("tests"):
                self.started[text.strip()] = None  # xdist announces a test before its result
            if (reason := REASON.match(text)) is not None:
                return {"what": reason["test"], "reason": reason["reason"]}
            return None
        outcome, test = found["first"] or found["last"], found["test"] or found["name"]
        self.started.pop(test.strip(), None)
        self.counts[outcome.lower()] = self.counts.get(outcome.lower(), 0) + 1
        return {"what": test, "error": "failed"} if outcome in ("FAILED", "ERROR") else None

    def end(self, status: int | None) -> Line:
        line: Line = {"tests": self.counts, "status": status}
        if status is None:
            line["running"] = list(self.started)
        elif status != 0 and not self.counts.keys() & {"failed", "error"}:
            line["error"] = f"status {status}: {' | '.join([x for x in self.tail if x][-3:])}"
        elif status == 0 and not self.counts.get("passed"):
            line["skipped"] = f"no test ran, {self.counts.get('skipped', 0)} were skipped"
        return line


class Sanitizer(Pytest):
    """Reads the same tests' output under a tool, which marks its own lines with =========."""

    def __init__(self) -> None:
        super().__init__()
        self.reports: list[str] = []

    def __call__(self, text: str | None, status: int | None) -> Line | None:
        if text is not None and text.startswith("========= "):
            self.reports.append(text.removeprefix("========= ").strip())
        return super().__call__(text, status)

    def end(self, status: int | None) -> Line:
        told = [x for x in self.reports if x and x != "COMPUTE-SANITIZER"]
        line = super().end(status) | {"reports": told[:40]}
        if status and told:
            line["error"] = told[0]
        return line


def pytest(name: str, *arguments: str, limit: float, plan: str = "", parallel: bool) -> Command:
    """Tests by their files and options."""
    command = [sys.executable, "-m", "pytest", "-v", "--tb=short", "-p", "no:cacheprovider"]
    if parallel:
        command += ["-n", str(min(MOST_WORKERS, os.cpu_count() or 1))]
    variables = {"PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "1", "COLUMNS": "300"}
    variables |= {"DDL_PLAN": plan} if plan else {}
    return Command(name, [*command, *arguments], Pytest(), variables, limit, ROOT)


def sanitizer(tool: str, limit: float) -> Command:
    """Some tests under a tool of compute-sanitizer."""
    script = str(ROOT / "tests" / "gpu" / "sanitize.py")
    command = [sys.executable, script, tool, "--choose", SANITIZED]
    return Command(tool, command, Sanitizer(), {"PYTHONUNBUFFERED": "1"}, limit, ROOT)


KEPT = re.compile(
    r"time_duration|wavefronts|stalled|issue_active|throughput.*pct|dram__bytes|bank_conflicts"
    r"|registers_per_thread|occupancy|warps_active"
)
SECTIONS = ("SpeedOfLight", "MemoryWorkloadAnalysis", "MemoryWorkloadAnalysis_Tables",
            "WarpStateStats", "SchedulerStats", "Occupancy", "LaunchStats")  # fmt: skip


class Counters:
    """Reads Nsight Compute's CSV: the metrics of one launch that say what it waits for."""

    def __init__(self) -> None:
        self.rows: list[str] = []
        self.said: list[str] = []

    def __call__(self, text: str | None, status: int | None) -> Line | None:
        if text is not None:
            (self.rows if text.startswith('"') else self.said).append(text)
            return None
        rows = list(csv.reader(io.StringIO("\n".join(self.rows))))
        if len(rows) < 3:  # names, units, a launch
            reason = next((x for x in self.said if x.startswith("==ERROR==")), f"status {status}")
            return {"skipped": f"Nsight Compute gave no counters: {reason}"}
        names, units, values = rows[:3]
        metrics = zip(names, units, values, strict=True)
        return {
            "metrics": {
                n: f"{value} {unit}".strip() for n, unit, value in metrics if KEPT.search(n)
            }
        }


def counters(name: str, case: dict[str, Any], kernel: str, limit: float) -> Command:
    """Hardware counters of the first launch of a kernel. The clocks are left as they are."""
    tool = shutil.which("ncu", path=f"{os.environ.get('PATH', '')}:/usr/local/cuda/bin") or "ncu"
    command = [tool, "--clock-control", "none", "--csv", "--page", "raw"]
    command += [f"--section={section}" for section in SECTIONS]
    command += ["--kernel-name", kernel, "--launch-count", "1"]
    message = {"job": "smoke", "arguments": {"case": case}, "plan": ""}
    command += [sys.executable, START, "worker", "cuda", json.dumps(message)]
    return Command(name, command, Counters(), {}, limit, ROOT)
