"""The operators release the GIL and use as many threads as torch does."""

from __future__ import annotations

import ctypes
import ctypes.util
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from ddl import functional


def runs_beside(call: Callable[[], object]) -> bool:
    """Return whether this thread runs in the middle of another thread's call."""
    span: list[float] = []

    def work() -> None:
        span.append(time.perf_counter())
        call()
        span.append(time.perf_counter())

    thread = threading.Thread(target=work)
    ticks = []
    thread.start()
    while thread.is_alive():
        ticks.append(time.perf_counter())
        time.sleep(0.001)
    start, end = span
    tenth = (end - start) / 10
    return any(start + tenth < tick < end - tenth for tick in ticks)


def test_other_python_threads_run_meanwhile() -> None:
    """The calls take tenths of a second, forward and backward."""
    torch.set_num_threads(1)
    x = torch.randn(16384, 64, requires_grad=True)
    weight = torch.randn(64, 4, 256, requires_grad=True)
    outputs = []
    assert runs_beside(lambda: outputs.append(functional.expand(x, weight, value_channels=4)))
    assert runs_beside(lambda: outputs[0].sum().backward())
    if sys.platform == "linux":  # a PyDLL's functions hold the GIL
        assert not runs_beside(lambda: ctypes.PyDLL(None).usleep(100_000))


THREADS = """
import os, torch
from ddl import functional

torch.set_num_threads(1)
arguments = [torch.randn(1000, *size) for size in ((64, 4), (64,), (4,), ())]
arguments[0].requires_grad_()
outputs = []
for threads in (1, 4):
    torch.set_num_threads(threads)
    before = len(os.listdir("/proc/self/task"))
    new = functional.rewrite(*arguments, eps_k=0.1)
    print(len(os.listdir("/proc/self/task")) - before)
    outputs.append((new, *torch.autograd.grad(new.square().sum(), arguments[:1])))
print(*(one.equal(other) for one, other in zip(*outputs, strict=True)))
print(*{line.split()[-1] for line in open("/proc/self/maps") if "omp" in line})
"""


def started(**variables: str) -> tuple[list[str], str]:
    """Return the threads that calls with 1 and with 4 start, and the open OpenMP libraries."""
    command = [sys.executable, "-c", THREADS]
    run = subprocess.run(command, env=os.environ | variables, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    one, four, equal, libraries = run.stdout.splitlines()
    assert equal == "True True"
    return [one, four], libraries


on_linux = pytest.mark.skipif(sys.platform != "linux", reason="counts threads as Linux lists them")


@on_linux
@pytest.mark.parametrize(
    ("kind", "expected"),
    [("openmp", ["0", "3"]), ("rayon", ["0", "4"])],  # with rayon the caller only waits
)
def test_as_many_threads_as_torch_has(kind: str, expected: list[str]) -> None:
    assert started(DDL_THREADS=kind)[0] == expected


@on_linux
@pytest.mark.parametrize("name", ["gomp", "omp", "iomp5"])
def test_threads_of_another_openmp_that_is_preloaded(name: str) -> None:
    """The system's libgomp, LLVM's and Intel's, which torch then uses in its own place, too."""
    of_pip = Path(sys.prefix) / "lib" / f"lib{name}.so"  # where intel-openmp puts it
    library = str(of_pip) if of_pip.exists() else ctypes.util.find_library(name)
    if library is None:
        pytest.skip(f"lib{name} is not installed")
    threads, libraries = started(LD_PRELOAD=library)
    assert any("/torch/lib/" not in path for path in libraries.split()), (
        "the loader could not open it"
    )
    assert threads == ["0", "3"]
