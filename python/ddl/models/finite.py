"""Weights have to be numbers: a model with NaN or infinity in them predicts nothing."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import Tensor

from ddl.errors import InputError


def not_finite(tensors: Mapping[str, Tensor]) -> str | None:
    """The name of a tensor that holds NaN or infinity, in this process's part of it; else None."""
    return _first(tensors, lambda tensor: not bool(torch.isfinite(tensor).all()))


def require_finite(weights: Mapping[str, Tensor], path: Path) -> None:
    """Raise InputError, which names the path they are from, if weights hold NaN or infinity."""
    name = not_finite(weights)
    if name is not None:
        raise InputError(path, "hold finite weights", f"NaN or infinity in {name}")


def require_no_nan(state: Mapping[str, Tensor], path: Path) -> None:
    """Raise InputError if an optimizer's state holds NaN; squares of its gradients may overflow."""
    name = _first(state, lambda tensor: bool(torch.isnan(tensor).any()))
    if name is not None:
        raise InputError(path, "hold the state of a run that has not diverged", f"NaN in {name}")


def _first(tensors: Mapping[str, Tensor], wrong: Callable[[Tensor], bool]) -> str | None:
    for name, tensor in tensors.items():
        if tensor.is_floating_point():
            local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
            if wrong(local.float() if local.itemsize == 1 else local):  # of float8
                return name
    return None
