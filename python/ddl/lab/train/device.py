"""The device of each process that trains, and repeatable results on it."""

from __future__ import annotations

import torch

from ddl import environment
from ddl.errors import InputError

from .processes import Processes


def device_of(processes: Processes, device: torch.device) -> torch.device:
    """The device of this one of several processes: each has a GPU of its own, or all the CPU.

    All processes must call it together. Raises InputError if that is impossible.
    """
    kinds = processes.gather(device.type)
    with processes.together():
        if len(set(kinds)) > 1:
            got = ", ".join(f"{kind} in process {rank}" for rank, kind in enumerate(kinds))
            raise InputError("device", "be the same in all processes", got)
        if processes.alone or device.type != "cuda":
            return device
        found = torch.cuda.device_count()
        if processes.local_rank >= found:
            raise InputError(
                "device",
                "be a GPU for each process",
                (
                    f"{found} for process {processes.local_rank} of this machine: start fewer with"
                    " --nproc-per-node"
                ),
            )
        torch.cuda.set_device(processes.local_rank)
    return torch.device("cuda", processes.local_rank)


def make_repeatable(device: torch.device) -> None:
    """On a GPU, make torch use deterministic algorithms; on a CPU they are deterministic anyway."""
    if device.type == "cuda":
        environment.set_default("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # sums in a fixed order
        torch.use_deterministic_algorithms(True, warn_only=True)
        # The mode fills new tensors as a debugging aid, which costs a pass over each of them.
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
