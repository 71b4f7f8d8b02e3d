"""GPUs, the driver, and NVRTC, which compiles the CUDA kernels."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from ddl.lab.machine import nvidia_smi

from .report import Facts, Report, is_linux, text_of, tilde

OLDEST = (8, 0)  # compute capability


def gpus(report: Report) -> Facts:
    """The accelerators that torch finds, and for each NVIDIA GPU whether our kernels run on it."""
    import torch

    facts: Facts = {
        "torch_built_for": built_for(torch),
        "driver": driver(),
        "nvrtc": nvrtc(),
        "devices": [],
    }
    if torch.version.hip is not None:
        facts["kernels"] = "plain PyTorch, because this torch is built for ROCm"
        return facts
    if not torch.cuda.is_available():
        if facts["driver"] is not None and torch.version.cuda is None:
            report.warning(
                "there is a GPU, and this torch is built for the CPU alone",
                "install a torch for CUDA, as https://pytorch.org says",
            )
        elif facts["driver"] is not None:
            report.warning(
                "NVIDIA's driver is there, and torch cannot use a GPU",
                "check `nvidia-smi` and CUDA_VISIBLE_DEVICES, and that the driver is new enough "
                f"for CUDA {torch.version.cuda}",
            )
        facts["devices"] = others(torch)
        return facts
    facts["devices"] = [gpu(report, torch, index) for index in range(torch.cuda.device_count())]
    return facts


def built_for(torch: Any) -> str:
    """The backend and version that this torch is built for."""
    if torch.version.hip is not None:
        return f"ROCm {torch.version.hip}"
    return "CPU" if torch.version.cuda is None else f"CUDA {torch.version.cuda}"


def driver() -> str | None:
    """The version of NVIDIA's driver; None without one."""
    driver = Path("/proc/driver/nvidia/version")
    if driver.exists():
        found = re.search(r"Kernel Module\D*?([\d.]{5,})", driver.read_text(errors="replace"))
        if found:
            return found[1]
    return nvidia_smi("driver_version") or None


def others(torch: Any) -> list[Facts]:
    """Accelerators without kernels of ours."""
    found = [name for name in ("mps", "xpu") if getattr(torch, name, None) is not None]
    return [
        {"device": name, "kernels": "plain PyTorch (ddl.reference)"}
        for name in found
        if getattr(torch, name).is_available()
    ]


def gpu(report: Report, torch: Any, index: int) -> Facts:
    """One NVIDIA GPU."""
    from ddl.cuda import why_unavailable

    properties = torch.cuda.get_device_properties(index)
    capability = (properties.major, properties.minor)
    reason = why_unavailable(index)
    if reason is not None:
        old = capability < OLDEST
        add = report.warning if old else report.error
        fix = "use a newer GPU for them" if old else "fix what it names"
        add(f"cuda:{index} runs as plain PyTorch ({reason})", fix)
    return {
        "device": f"cuda:{index}",
        "name": properties.name,
        "capability": f"{capability[0]}.{capability[1]}",
        "memory_gib": round(properties.total_memory / 2**30, 1),
        "multiprocessors": properties.multi_processor_count,
        "kernels": "CUDA" if reason is None else "plain PyTorch (ddl.reference)",
        "why": reason,
    }


def nvrtc() -> Facts:
    """Whether native code finds NVRTC, and which file it is. It is loaded for that.

    A missing one is no problem by itself: without a GPU nobody needs it.
    """
    if not is_linux():
        return {"found": False, "file": None, "why": "NVRTC is for Linux"}
    try:
        import ddl.ops  # noqa: F401  (tells native code where torch's libraries lie)
        from ddl import _native

        _native.Warmup(f"sm_{OLDEST[0]}{OLDEST[1]}", 0)
    except ValueError as error:  # it is found, and no longer compiles for this architecture
        return {"found": True, "file": loaded(), "why": text_of(error)}
    except Exception as error:
        return {"found": False, "file": None, "why": text_of(error)}
    return {"found": True, "file": loaded(), "why": None}


def loaded() -> str | None:
    """The NVRTC library in this process."""
    maps = Path("/proc/self/maps")
    if not maps.exists():
        return None
    for line in maps.read_text(errors="replace").splitlines():
        path = line.split(maxsplit=5)[-1]
        name = path.rpartition("/")[2]
        if name.startswith("libnvrtc") and "builtins" not in name:
            return tilde(path)
    return None
