"""Where and when a benchmark ran: the part that all records share. Nothing in it names a path."""

from __future__ import annotations

import os
import platform
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch

from ddl import _native
from ddl.lab.machine import cpu_model, digest, memory_gib, output


def environment(repository: Path | None = None) -> dict[str, Any]:
    """Machine, software and load as JSON types. Call it first: benchmarks raise the load.

    repository: the root of the checkout that runs; None for an installed package.
    """
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
        "ddl": _native.__version__,
        "commit": None if repository is None else commit(repository),
        "native": digest(Path(_native.__file__)),  # a commit does not say which build ran
    }


def checkout() -> Path | None:
    """The root of the repository that this package runs from; None for an installed one.

    A virtual environment may lie in another project's repository, whose commit says nothing here.
    """
    root = Path(__file__).resolve().parents[3]
    return root if (root / "kernels").is_dir() and (root / "Cargo.toml").is_file() else None


def commit(repository: Path) -> dict[str, Any] | None:
    """{"hash", "dirty"} of the working tree, None outside a repository.

    Files in benchmarks/results do not count as changes: an earlier benchmark has just written
    there.
    """
    git = ("git", "-C", str(repository))
    found = output(*git, "rev-parse", "HEAD")
    if not found:
        return None
    changes = output(*git, "status", "--porcelain", "--", ".", ":!benchmarks/results")
    return {"hash": found, "dirty": changes != ""}


def describe(where: dict[str, Any]) -> str:
    """An environment in one line of prose."""
    machine, at = where["machine"], where["commit"]
    tree = "no commit" if at is None else at["hash"][:10] + (" + changes" if at["dirty"] else "")
    return (
        f"{where['date']} · {machine['cpu']}, {machine['cores']} cores, {machine['simd']}, "
        f"{machine['memory_gib']:g} GiB · {counted(where['threads'], 'thread')}, "
        f"load average before {where['load_average'][0]:g} · torch {where['torch']} · {tree}, "
        f"extension {where['native']}"
    )


def counted(number: int, thing: str) -> str:
    """A number of things: 1 thread, 2 threads."""
    return f"{number} {thing}{'s' * (number != 1)}"
