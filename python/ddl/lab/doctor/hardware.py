"""The processor, and GPUs with their driver and NVRTC, which compiles the CUDA kernels."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path
from typing import Any

from ddl import environment
from ddl.lab.machine import cpu_model, memory_gib, nvidia_smi, usable_cores

from .report import Facts, Report, is_linux, text_of, tilde

PLAIN = "plain PyTorch (ddl.reference)"
OLDEST = (8, 0)  # compute capability


def processor(report: Report) -> Facts:
    """Model, vector instructions of the CPU kernels, cores, memory, and where the kernels run."""
    import torch

    from ddl import _native

    cores, threads = usable_cores(), torch.get_num_threads()
    if threads > cores:
        report.warning(
            f"torch has {threads} threads on {cores} cores that this process may use",
            f"set OMP_NUM_THREADS={cores}, or call torch.set_num_threads({cores})",
        )
    rayon = environment.to_report().get("DDL_THREADS") == "rayon"
    openmp = is_linux() and not rayon and hasattr(ctypes.CDLL(None), "GOMP_parallel")
    return {
        "model": cpu_model(),
        "simd": _native.simd_level(),
        "cores": os.cpu_count(),
        "usable_cores": cores,
        "memory_gib": memory_gib(),
        "torch_threads": threads,
        "kernel_threads": "torch's OpenMP" if openmp else "Rayon",
    }


def gpus(report: Report) -> Facts:
    """The accelerators that torch finds, and for each NVIDIA GPU whether our kernels run on it."""
    import torch

    facts: Facts = {
        "torch_built_for": built_for(torch),
        "driver": nvidia_smi("driver_version") or None,
        "nvrtc": nvrtc(),
    }
    if torch.version.hip is None and torch.cuda.is_available():
        return facts | {
            f"cuda:{index}": gpu(report, torch, index) for index in range(torch.cuda.device_count())
        }
    if torch.version.hip is None and facts["driver"] is not None:
        if torch.version.cuda is None:
            report.warning(
                "there is a GPU, and this torch is built for the CPU alone",
                "install a torch for CUDA, as https://pytorch.org says",
            )
        else:
            report.warning(
                "NVIDIA's driver is there, and torch cannot use a GPU",
                "check `nvidia-smi` and CUDA_VISIBLE_DEVICES, and that the driver is new enough "
                f"for CUDA {torch.version.cuda}",
            )
    other = torch.accelerator.current_accelerator(check_available=True)
    return facts | ({"gpu": "none"} if other is None else {other.type: PLAIN})


def built_for(torch: Any) -> str:
    """The backend and version that this torch is built for."""
    if torch.version.hip is not None:
        return f"ROCm {torch.version.hip}"
    return "CPU" if torch.version.cuda is None else f"CUDA {torch.version.cuda}"


def gpu(report: Report, torch: Any, index: int) -> str:
    """One NVIDIA GPU: name, compute capability, memory, and what the operators are there."""
    from ddl.cuda import why_unavailable

    found = torch.cuda.get_device_properties(index)
    reason = why_unavailable(index)
    if reason is not None:
        old = (found.major, found.minor) < OLDEST
        add = report.warning if old else report.error
        fix = "use a newer GPU for them" if old else "fix what it names"
        add(f"cuda:{index} runs as plain PyTorch ({reason})", fix)
    kernels = "CUDA kernels" if reason is None else PLAIN
    memory = found.total_memory / 2**30
    return f"{found.name}, {found.major}.{found.minor}, {memory:.1f} GiB; {kernels}"


def nvrtc() -> str:
    """The file of NVRTC, or why native code cannot use it. It is loaded for that.

    A missing one is no problem by itself: without a GPU nobody needs it.
    """
    if not is_linux():
        return "none: CUDA is for Linux"
    try:
        import ddl.ops  # noqa: F401  (tells native code where torch's libraries lie)
        from ddl import _native

        _native.Warmup(f"sm_{OLDEST[0]}{OLDEST[1]}", 0)
    except Exception as error:
        return f"none: {text_of(error)}"
    for line in Path("/proc/self/maps").read_text(errors="replace").splitlines():
        path = line.split(maxsplit=5)[-1]
        name = path.rpartition("/")[2]
        if name.startswith("libnvrtc") and "builtins" not in name:
            return tilde(path)
    return "found"
