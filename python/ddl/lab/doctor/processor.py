"""The processor: its features, the SIMD level of the CPU kernels, threads and memory."""

from __future__ import annotations

import ctypes
import os
import platform
from pathlib import Path

from ddl import environment
from ddl.lab.machine import cpu_model, memory_gib, output, usable_cores

from .report import Facts, Report, is_linux

# Flags as in /proc/cpuinfo of the processors for which the native code uses a level: the vector
# features of Level::Avx512 and Level::Avx2 in the crate fearless_simd. The others that it asks for
# are in every processor with these, and Linux hides some of them: rdseed on AMD's Zen 5.
AVX2 = frozenset(["avx2", "bmi1", "bmi2", "f16c", "fma", "abm", "movbe"])
AVX512 = frozenset([
    "avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl", "avx512ifma", "avx512vbmi",
    "avx512_vbmi2", "avx512_bitalg", "avx512_vnni", "avx512_vpopcntdq", "gfni", "vaes",
    "vpclmulqdq",
])  # fmt: skip
X86, ARM = ("x86_64", "amd64"), ("aarch64", "arm64")


def processor(report: Report) -> Facts:
    """Model, features, SIMD level, cores, memory, threads, and where CPU kernels run."""
    flags = cpu_flags()
    facts: Facts = {
        "model": cpu_model(),
        "features": features(flags),
        "simd": simd_level(flags),
        "cores": os.cpu_count(),
        "usable_cores": usable_cores(),
        "memory_gib": memory_gib(),
        "available_gib": available_gib(),
    }
    facts |= threads(report, facts["usable_cores"])
    return facts


def cpu_flags() -> frozenset[str] | None:
    """The processor's flags as Linux names them; None where the system does not tell them."""
    if platform.machine().lower() in ARM and platform.system() == "Darwin":
        return frozenset(["asimd"])  # every ARM Mac has it
    info = Path("/proc/cpuinfo")
    if not info.exists():
        listed = output("sysctl", "-n", "machdep.cpu.features", "machdep.cpu.leaf7_features")
        return None if listed is None else frozenset(listed.lower().split())
    for line in info.read_text(encoding="utf-8", errors="replace").splitlines():
        name, _, value = line.partition(":")
        if name.strip() in ("flags", "Features"):
            return frozenset(value.split())
    return None


def features(flags: frozenset[str] | None) -> list[str]:
    """Those of AVX2, AVX-512 and NEON that the processor has."""
    names = {"AVX2": "avx2", "AVX-512": "avx512f", "NEON": "asimd"}
    return [name for name, flag in names.items() if flag in (flags or ())]


def simd_level(flags: frozenset[str] | None) -> str | None:
    """The instructions of the CPU kernels: the widest of the processor, unless DDL_SIMD lowers it.

    None where the system does not tell what the processor has.
    """
    machine, lowered = platform.machine().lower(), environment.to_report().get("DDL_SIMD")
    if machine in ARM:
        return "NEON"  # part of the architecture; `portable` is NEON as well
    if machine not in X86:
        return "portable"
    if lowered == "portable":
        return "SSE2"
    if flags is None:
        return None
    if flags >= AVX512 and lowered != "avx2":
        return "AVX-512"
    return "AVX2" if flags >= AVX2 else "SSE2"


def available_gib() -> float | None:
    """Memory that can be had without swapping; None where the system does not tell it."""
    info = Path("/proc/meminfo")
    if info.exists():
        for line in info.read_text(encoding="utf-8").splitlines():
            if line.startswith("MemAvailable:"):
                return round(int(line.split()[1]) / 2**20, 1)
    return None


def threads(report: Report, cores: int) -> Facts:
    """Threads of torch, and whether CPU kernels run on torch's OpenMP threads or on Rayon's."""
    try:
        import torch
    except Exception:  # `versions` says why
        return {"torch_threads": None, "kernel_threads": None}
    count = torch.get_num_threads()
    if count > cores:
        report.warning(
            f"torch has {count} threads on {cores} cores that this process may use",
            f"set OMP_NUM_THREADS={cores}, or call torch.set_num_threads({cores})",
        )
    rayon = environment.to_report().get("DDL_THREADS") == "rayon"
    openmp = is_linux() and not rayon and hasattr(ctypes.CDLL(None), "GOMP_parallel")
    return {"torch_threads": count, "kernel_threads": "torch's OpenMP" if openmp else "Rayon"}
