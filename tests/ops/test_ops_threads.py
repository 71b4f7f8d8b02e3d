"""The operators release the GIL and use as many threads as torch does."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable

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
arguments = [torch.zeros(1000, *size) for size in ((64, 4), (64,), (4,), ())]
for threads in (1, 4):
    torch.set_num_threads(threads)
    before = len(os.listdir("/proc/self/task"))
    functional.rewrite(*arguments, eps_k=0.1)
    print(len(os.listdir("/proc/self/task")) - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="counts threads as Linux lists them")
@pytest.mark.parametrize(
    ("kind", "started"),
    [("openmp", ["0", "3"]), ("rayon", ["0", "4"])],  # with rayon the caller only waits
)
def test_as_many_threads_as_torch_has(kind: str, started: list[str]) -> None:
    run = subprocess.run(
        [sys.executable, "-c", THREADS],
        env=os.environ | {"DDL_THREADS": kind},
        capture_output=True,
        text=True,
    )
    assert run.stdout.split() == started, run.stderr
