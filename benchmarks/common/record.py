"""Where and when a benchmark ran, and the files it leaves: results/NAME.jsonl and results/NAME.md.

A line of the JSONL file is one run with every time that was taken; the Markdown file is the table
of the last run. Neither names the machine or any of its paths.
"""

from __future__ import annotations

import hashlib
import os
import platform
import resource
import subprocess
import sys
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch

import ddl
from common import jsonl
from ddl import _native

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results"


def environment() -> dict[str, Any]:
    """Machine, software and load as JSON types. Call it first: benchmarks raise the load."""
    return {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "machine": {
            "cpu": cpu_model(),
            "cores": os.cpu_count(),
            "memory_gib": memory_gib(),
            "simd": torch.backends.cpu.get_cpu_capability(),
            "system": f"{platform.system()} {platform.machine()}",
        },
        "load_average": [round(load, 2) for load in os.getloadavg()],
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "ddl": ddl.__version__,
        "commit": commit(),
        "native": native_digest(),
    }


def cpu_model() -> str:
    """The processor's model name, or its architecture if the system does not tell the name."""
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    if sys.platform == "darwin":
        return output("sysctl", "-n", "machdep.cpu.brand_string") or platform.machine()
    return platform.processor() or platform.machine()


def memory_gib() -> float:
    """Physical memory."""
    return round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1)


def peak_gib() -> float:
    """The peak resident memory of this process so far."""
    unit = 1 if sys.platform == "darwin" else 2**10  # getrusage counts bytes there, KiB elsewhere
    return round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**30, 1)


def commit() -> dict[str, Any] | None:
    """{"hash", "dirty"} of the working tree, None outside a repository.

    Files in benchmarks/results do not count as changes: an earlier benchmark has just written
    there.
    """
    digest = output("git", "-C", str(ROOT), "rev-parse", "HEAD")
    if not digest:
        return None
    changes = output(
        "git", "-C", str(ROOT), "status", "--porcelain", "--", ".", ":!benchmarks/results"
    )
    return {"hash": digest, "dirty": changes != ""}


def native_digest() -> str:
    """First digits of the extension's SHA-256, because a commit does not say which build ran."""
    assert _native.__file__ is not None
    return hashlib.sha256(Path(_native.__file__).read_bytes()).hexdigest()[:12]


def write(name: str, record: dict[str, Any], summary: str, folder: Path) -> None:
    """Append `record` to NAME.jsonl and replace NAME.md by `summary`, under `folder`."""
    jsonl.append(folder / f"{name}.jsonl", record)
    (folder / f"{name}.md").write_text(summary, encoding="utf-8")


def describe(where: dict[str, Any]) -> str:
    """An environment in one line of prose."""
    machine, at = where["machine"], where["commit"]
    tree = "no commit" if at is None else at["hash"][:10] + (" + changes" if at["dirty"] else "")
    return (
        f"{where['date']} · {machine['cpu']}, {machine['cores']} cores, {machine['simd']}, "
        f"{machine['memory_gib']:g} GiB · {where['threads']} threads, load average before "
        f"{where['load_average'][0]:g} · torch {where['torch']} · {tree}, extension "
        f"{where['native']}"
    )


def output(*command: str) -> str | None:
    """Standard output without surrounding space, None if the command is missing or fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()
