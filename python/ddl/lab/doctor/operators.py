"""Which code each operator runs on each device of this machine."""

from __future__ import annotations

from typing import Any

from .processor import cpu_flags, simd_level
from .report import Facts, Report, text_of

FORWARD = ("rewrite", "read", "rewrite_read", "expand")
SIZES = {"batch": 1, "time": 64, "d": 768, "m": 4}  # of the calls whose CUDA kernels are listed


def operators(report: Report) -> Facts:
    """How many operators are registered with torch, and their kernels by device."""
    import torch

    import ddl.ops  # noqa: F401  (registers them)
    from ddl.ops.declarations import OPERATORS

    on_gpus = [operator for operator in OPERATORS if not operator.on_cpus_alone]
    devices = {"cpu": f"native, {simd_level(cpu_flags()) or 'SIMD of the processor'}"}
    devices |= gpu_kernels(torch)
    return {
        "registered": {
            "CPU": str(len(OPERATORS)),
            "CUDA": str(len(on_gpus)),
        },
        "kernels": {name: dict(devices) for name in FORWARD},
        "cuda_kernels": compiled(report, torch),
    }


def gpu_kernels(torch: Any) -> dict[str, str]:
    """The implementation that the operators run on each GPU that torch can use."""
    from ddl.cuda import why_unavailable

    if not torch.cuda.is_available() or torch.version.hip is not None:
        return {}
    found = {}
    for index in range(torch.cuda.device_count()):
        plain = why_unavailable(index) is not None
        found[f"cuda:{index}"] = "plain PyTorch (ddl.reference)" if plain else "CUDA kernels"
    return found


def compiled(report: Report, torch: Any) -> list[Facts]:
    """The CUDA kernels of a rewrite_read, its backward and an expansion, on the first GPU.

    They are compiled for it, or found in the cache, and planned as for training in bfloat16.
    """
    if "CUDA kernels" not in gpu_kernels(torch).values():
        return []
    from ddl import cuda, nn

    stream = nn.DeltaStream(
        SIZES["d"], [torch.nn.Identity()], value_channels=SIZES["m"], dtype=torch.bfloat16
    )
    x = torch.zeros(SIZES["batch"], SIZES["time"], SIZES["d"], dtype=torch.bfloat16)
    try:
        return [kernel._asdict() for kernel in cuda.warmup(stream, x)]
    except Exception as error:
        report.error(
            f"the CUDA kernels of this GPU cannot be compiled ({text_of(error)})",
            "run with DDL_LOG=debug and open an issue with what it says",
        )
        return []
