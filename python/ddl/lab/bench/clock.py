"""Time on a device, measured between CUDA events on its stream.

Every measurement begins with copies between two large buffers, the last of which is timed as well.
They have three purposes: while the device copies, the host queues the work behind it, so that no
gap between launches is measured; they evict the operands from the L2 cache; and the rate, from the
same moment, is the one to compare with. On a CPU the same code reads the host's clock, so that it
can be tested without a GPU.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import cached_property
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from ddl.lab import machine

from .measure import Timed

# Copies before the one that is timed. One of 2 GiB took 1 ms on an H200, whose host took 2 ms to
# queue eight small backwards, and these were timed with its gaps.
COPIES_AHEAD = 4


class Clock:
    """Times stages of work on a device, each measurement behind copies of `copy_bytes`."""

    def __init__(self, device: torch.device, copy_bytes: int) -> None:
        self.device, self.copy_bytes = device, copy_bytes

    @cached_property
    def source(self) -> Tensor:
        return torch.randn(self.copy_bytes // 4, device=self.device)

    @cached_property
    def target(self) -> Tensor:
        return torch.empty_like(self.source)

    @property
    def copied_bytes(self) -> int:
        """Bytes that the copy moves. Every byte is read and written."""
        return 2 * self.copy_bytes

    @property
    def cache_bytes(self) -> int:
        """Size of the L2 cache. On a CPU, where it does not matter, one page."""
        if self.device.type != "cuda":
            return 4096
        return torch.cuda.get_device_properties(self.device).L2_cache_size

    def timed(self, *stages: Callable[[], Any]) -> Timed:
        """Runs the copy and the stages and returns the seconds of each.

        The stages' results are kept until the clock stops, so that freeing them is not timed.
        """

        def run() -> tuple[float, ...]:
            if self.device.type == "cuda":
                for _ in range(COPIES_AHEAD):
                    self.target.copy_(self.source)
            marks = [self._mark()]
            self.target.copy_(self.source)
            marks.append(self._mark())
            kept = []
            for stage in stages:
                kept.append(stage())
                marks.append(self._mark())
            return self._between(marks)

        return run

    def wait(self) -> None:
        """Wait until the device has done all its work."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def release(self) -> None:
        """Return cached memory that no tensor holds to the device."""
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def _mark(self) -> Any:
        if self.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _between(self, marks: list[Any]) -> tuple[float, ...]:
        if self.device.type != "cuda":
            return tuple(b - a for a, b in pairwise(marks))
        marks[-1].synchronize()
        return tuple(a.elapsed_time(b) / 1e3 for a, b in pairwise(marks))


def describe(device: torch.device) -> dict[str, Any]:
    """Name, driver and size of a device, as JSON types."""
    if device.type != "cuda":
        return {"device": machine.cpu_model(), "driver": None}
    properties = torch.cuda.get_device_properties(device)
    return {
        "device": properties.name,
        "driver": machine.nvidia_smi("driver_version"),
        "cuda": torch.version.cuda,
        "capability": f"{properties.major}.{properties.minor}",
        "multiprocessors": properties.multi_processor_count,
        "memory_gib": round(properties.total_memory / 2**30, 1),
        "l2_mib": round(properties.L2_cache_size / 2**20, 1),
    }
