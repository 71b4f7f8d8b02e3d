"""Compiles ahead, side by side on all cores, the kernels that the measurements will launch."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

import ddl.cuda
from ddl import functional
from ddl.lab.bench.agreement import make
from ddl.lab.bench.problems import Case, build
from gpu.log import Line
from gpu.models import Setting

ARCHITECTURE = "sm_90"  # an H100's and an H200's, if there is no GPU
# Of a multiprocessor from sm_80 on: registers, which a warp gets by 256, and threads. A block takes
# 1 KB of shared memory for itself.
REGISTERS, THREADS, RESERVED = 65_536, 2_048, 1_024
SHARED = 228 << 10  # of an H100 or H200


class Calls(nn.Module):
    """Calls operators by name: a module, because `ddl.cuda.warmup` takes one."""

    def forward(self, calls: list[tuple[str, dict[str, Any]]]) -> list[Any]:
        return [getattr(functional, op)(**arguments) for op, arguments in calls]


def warm(module: nn.Module, *args: Any, device: torch.device, **kwargs: Any) -> list[Any]:
    architecture = None if device.type == "cuda" else ARCHITECTURE
    return ddl.cuda.warmup(module, *args, architecture=architecture, **kwargs)


def compile_ops(every: Sequence[Case], device: torch.device) -> list[Line]:
    """The kernels of cases of operators, which their gradients included need."""
    problems = [build(replace(case, batch=1, time=8)) for case in every]
    calls = [(c.op, p.inputs | p.numbers) for c, p in zip(every, problems, strict=True)]
    return [timed(f"kernels of {len(every)} cases", lambda: warm(Calls(), calls, device=device))]


def compile_models(every: Sequence[Setting], device: torch.device) -> list[Line]:
    """The kernels of models; one layer has all that many have."""

    def work() -> list[Any]:
        found = []
        for setting in every:
            for residual in setting.residuals:
                config = replace(setting.config, residual=residual, num_layers=1)
                found += model_kernels(make(config), setting, device)
        return found

    return [timed(f"kernels of the models of {len(every)} settings", work)]


def model_kernels(model: nn.Module, setting: Setting, device: torch.device) -> list[Any]:
    """Those of the timed precision, and of float32, in which a model is checked."""
    idx = setting.tokens(1, torch.device("cpu"))
    found = warm(model, idx, device=device, labels=idx)
    if setting.precision == "bfloat16":
        return found + warm(model.bfloat16(), idx, device=device, labels=idx)
    with torch.autocast(device.type, torch.bfloat16):
        return found + warm(model, idx, device=device, labels=idx)


def timed(what: str, work: Callable[[], list[Any]]) -> Line:
    started = time.perf_counter()
    kernels = work()
    return {
        "what": what,
        "kernels": len(kernels),
        "found": sum(kernel.cached for kernel in kernels),
        "seconds": round(time.perf_counter() - started, 2),
        "compiler_seconds": round(sum(kernel.seconds for kernel in kernels), 2),
        "spilling": [kernel._asdict() for kernel in kernels if kernel.spilled],
        "crowded": [kernel._asdict() for kernel in kernels if resident(kernel) < planned(kernel)],
    }


def kernels_of(cases: Sequence[Case], device: torch.device) -> list[str]:
    """Plan, registers and spills of the kernels of cases, which are in the cache by now."""
    problems = [build(replace(case, batch=1, time=8)) for case in cases]
    calls = [(c.op, p.inputs | p.numbers) for c, p in zip(cases, problems, strict=True)]
    return [
        f"{kernel.name} {kernel.macros[kernel.macros.index('CLUSTER=') :]}, "
        f"{kernel.registers} registers, {kernel.spilled} bytes spilled"
        for kernel in warm(Calls(), calls, device=device)
    ]


def planned(kernel: Any) -> int:
    """The blocks on a multiprocessor that the plan counts on."""
    return int(macros(kernel)["BLOCKS"])


def resident(kernel: Any) -> int:
    """The blocks on a multiprocessor for which there are registers, threads and shared memory."""
    threads = int(macros(kernel)["THREADS"])
    warp = -(-32 * kernel.registers // 256) * 256
    by_registers = REGISTERS // warp // -(-threads // 32)
    by_shared = SHARED // (kernel.shared + RESERVED)
    return min(by_registers, by_shared, THREADS // threads)


def macros(kernel: Any) -> dict[str, str]:
    return dict(word.split("=", 1) for word in kernel.macros.split())
