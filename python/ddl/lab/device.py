"""The device that a command runs on."""

from __future__ import annotations

import warnings

import torch

from ddl import cuda
from ddl.errors import InputError
from ddl.models.config import FUSED


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


def _why_no_gpu(residual: str) -> str | None:
    if not torch.cuda.is_available():
        return "torch finds no GPU"
    # Other residuals use torch alone, so they run on GPUs that our kernels do not support.
    return cuda.why_unavailable() if residual in FUSED else None
