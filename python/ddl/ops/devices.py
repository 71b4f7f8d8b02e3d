"""Which devices have kernels."""

from __future__ import annotations

import threading
import warnings

import torch

from ddl import _native, environment

from .private import assume_constant_result

WITH_KERNELS = ("cpu", "meta")  # and CUDA, where it works
_KNOWN: dict[torch.device, bool] = {}
_lock = threading.Lock()


def has_kernels(device: torch.device, on_cpus_alone: bool = False) -> bool:
    """Return whether the operators have kernels for a device; if not, warn once.

    Without kernels plain PyTorch runs there. on_cpus_alone: for an operator without CUDA kernels,
    of which nothing is said.
    """
    if device.type in WITH_KERNELS:
        return True
    return not on_cpus_alone and _has_kernels(device)


@assume_constant_result
def _has_kernels(device: torch.device) -> bool:
    with _lock:  # threads that ask at once get one warning
        if device in _KNOWN:
            return _KNOWN[device]
        reason = _why_without(device)
        _KNOWN[device] = reason is None
    if reason is not None:
        warnings.warn(
            f"ddl has no kernels for {device}, and runs as plain PyTorch there, slower and with "
            f"more memory: {reason}",
            stacklevel=4,
        )
    return reason is None


def _why_without(device: torch.device) -> str | None:
    """A sentence that says why a device has no kernels; None if it has."""
    if device.type != "cuda":
        return 'kernels exist for device="cpu" and for NVIDIA\'s GPUs'
    if torch.version.hip is not None:
        return "this torch is built for ROCm, and the kernels are for NVIDIA's GPUs"
    if not torch.cuda.is_available():
        return None  # a fake tensor: nothing will run here
    if environment.is_set("DDL_PLAN"):
        return None  # a wrong plan is an error of the operator, and nothing else is to be timed
    index = torch.cuda.current_device() if device.index is None else device.index
    return _native.why_unavailable(index)
