"""The kernels: what each operator runs on each device, and the directory of compiled ones."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Any

from ddl import environment
from ddl.errors import InputError

from .hardware import PLAIN
from .report import Facts, Report, text_of, tilde

SIZES = {"batch": 1, "time": 64, "d": 768, "m": 4}  # of the calls whose CUDA kernels are listed
ELSEWHERE = "name another directory in DDL_CACHE_DIR"


def operators(report: Report) -> Facts:
    """How many operators are registered with torch, what runs them, and the CUDA kernels."""
    import torch

    import ddl.ops  # noqa: F401  (registers them)
    from ddl.ops.declarations import OPERATORS

    on_gpus = sum(not operator.on_cpus_alone for operator in OPERATORS)
    facts: Facts = {
        "registered": f"{len(OPERATORS)} for CPU, {on_gpus} for CUDA",
        "cpu": "native",
    }
    gpus = gpu_kernels(torch)
    return facts | gpus | compiled(report, torch, gpus)


def gpu_kernels(torch: Any) -> dict[str, str]:
    """The code that runs the operators on each GPU that torch can use."""
    from ddl.cuda import why_unavailable

    if not torch.cuda.is_available() or torch.version.hip is not None:
        return {}
    return {
        f"cuda:{index}": "CUDA kernels" if why_unavailable(index) is None else PLAIN
        for index in range(torch.cuda.device_count())
    }


def compiled(report: Report, torch: Any, gpus: dict[str, str]) -> Facts:
    """The CUDA kernels of a rewrite_read, its backward and an expansion, on the first GPU.

    They are compiled for it, or found in the cache, and planned as for training in bfloat16.
    """
    if "CUDA kernels" not in gpus.values():
        return {}
    from ddl import cuda, nn

    stream = nn.DeltaStream(
        SIZES["d"], [torch.nn.Identity()], value_channels=SIZES["m"], dtype=torch.bfloat16
    )
    x = torch.zeros(SIZES["batch"], SIZES["time"], SIZES["d"], dtype=torch.bfloat16)
    try:
        found = cuda.warmup(stream, x)
    except Exception as error:
        report.error(
            f"the CUDA kernels of this GPU cannot be compiled ({text_of(error)})",
            "run with DDL_LOG=debug and open an issue with what it says",
        )
        return {}
    return {f"{kernel.name} ({kernel.architecture})": kernel.macros for kernel in found}


def cache(report: Report) -> Facts:
    """Where compiled kernels are kept, whether they can be, and how many there are."""
    try:
        directory = environment.cache_directory()
    except InputError as error:
        report.warning(str(error), ELSEWHERE)
        return {"directory": None}
    if directory is None:
        report.warning("there is no home directory for compiled kernels", ELSEWHERE)
        return {"directory": None}
    exists = directory.exists()
    place = directory if exists else next(p for p in directory.parents if p.exists())
    writable = place.is_dir() and os.access(place, os.W_OK | os.X_OK)
    facts: Facts = {"directory": tilde(directory), "exists": exists, "writable": writable}
    if not writable:
        report.warning(
            f"{tilde(directory)}, for compiled kernels, cannot be written, so that each process"
            " compiles them",
            ELSEWHERE,
        )
    if exists:
        facts["private"] = is_private(report, directory)
        sizes = [path.stat().st_size for path in directory.glob("*.kernel")]
        facts |= {"kernels": len(sizes), "mib": round(sum(sizes) / 2**20, 1)}
    return facts


def is_private(report: Report, directory: Path) -> bool:
    """Whether only the user can write there. CUDA kernels are refused if others can."""
    found = directory.stat()
    owner, others = found.st_uid in (os.geteuid(), 0), found.st_mode & 0o022
    if not owner:
        report.error(
            f"{tilde(directory)}, for compiled kernels, belongs to another user", ELSEWHERE
        )
    elif others:
        mode = stat.S_IMODE(found.st_mode)
        report.error(
            f"others can write to {tilde(directory)}, for compiled kernels (mode {mode:o}), so that"
            " CUDA kernels are refused",
            f"chmod go-w {tilde(directory)}",
        )
    return owner and not others
