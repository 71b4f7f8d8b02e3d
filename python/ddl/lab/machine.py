"""Facts about the machine that need neither torch nor native code: processor, memory, cores."""

from __future__ import annotations

import hashlib
import os
import platform
import resource
import subprocess
import sys
from pathlib import Path

SECONDS = 20  # after which a command that does not answer is given up


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


def usable_cores() -> int:
    """Cores on which this process may run; fewer than there are in most containers."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def memory_gib() -> float:
    """Physical memory in GiB."""
    return round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1)


def peak_bytes() -> int:
    """The peak resident memory of this process so far."""
    unit = 1 if sys.platform == "darwin" else 2**10  # getrusage counts bytes there, KiB elsewhere
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def nvidia_smi(*fields: str) -> str | None:
    """These fields of the first NVIDIA GPU, separated by ", "; None without nvidia-smi."""
    query = f"--query-gpu={','.join(fields)}"
    return output("nvidia-smi", query, "--format=csv,noheader", "--id=0")


def digest(file: Path) -> str:
    """The first twelve digits of a file's SHA-256, which tell two builds of one version apart."""
    return hashlib.sha256(file.read_bytes()).hexdigest()[:12]


def output(*command: str) -> str | None:
    """Standard output without surrounding space, None if the command is missing, fails or hangs."""
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, check=True, timeout=SECONDS, errors="replace"
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
