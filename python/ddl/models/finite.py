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


def local_part(tensor: Tensor) -> Tensor:
    """This process's part of a sharded tensor; another tensor itself."""
    to_local = getattr(tensor, "to_local", None)
    return tensor if to_local is None else to_local()


def _first(tensors: Mapping[str, Tensor], wrong: Callable[[Tensor], bool]) -> str | None:
    parts = ((name, local_part(t)) for name, t in tensors.items() if t.is_floating_point())
    wide = ((name, t.float() if t.itemsize == 1 else t) for name, t in parts)  # of float8
    return next((name for name, tensor in wide if wrong(tensor)), None)
