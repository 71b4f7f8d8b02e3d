"""The device that a run trains on."""

from __future__ import annotations

import warnings

import torch

from ddl import cuda, environment
from ddl.errors import InputError
from ddl.lab.config import BASELINES

from .processes import Processes


def pick_device(name: str, residual: str) -> torch.device:
    """Return the device for "auto", "cpu" or "cuda".

    "auto" is the GPU if there is one that can run the residual's operators, else the CPU, with a
    warning if torch could use a GPU. Raises InputError for "cuda" if there is no such GPU.
    """
    reason = None
    if name != "cpu":  # for "cpu", do not even look for the driver
        reason = _why_no_gpu(residual)
    if name == "cuda" and reason:
        raise InputError("device", f"be cpu, because {reason}", "'cuda'")
    if reason and torch.cuda.is_available():
        warnings.warn(f"`auto` takes the CPU, because {reason}", stacklevel=2)
    return torch.device("cpu" if name == "cpu" or reason else "cuda")


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


def _why_no_gpu(residual: str) -> str | None:
    if not torch.cuda.is_available():
        return "torch finds no GPU"
    # The baselines use torch alone, so they run on GPUs that our kernels do not support.
    return None if residual in BASELINES else cuda.why_unavailable()


def make_repeatable(device: torch.device) -> None:
    """On a GPU, make torch use deterministic algorithms; on a CPU they are deterministic anyway."""
    if device.type == "cuda":
        environment.make_cublas_repeatable()
        torch.use_deterministic_algorithms(True, warn_only=True)
        # The mode fills new tensors as a debugging aid, which costs a pass over each of them.
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
