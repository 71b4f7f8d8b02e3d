"""Tensors of a pass as numpy arrays with a row for each token."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ddl.errors import InputError

__all__ = ["Array", "finite", "rows"]

Array = npt.NDArray[np.float64]


def finite(state: Array, sublayers: int) -> Array:
    """The states after so many sublayers; InputError if one is not finite."""
    if not np.isfinite(state).all():
        got = f"NaN or infinity after {sublayers} sublayers, as of training that has diverged"
        raise InputError("model", "have finite states", got)
    return state


def rows(x: Tensor, own: int) -> Array:
    """All tokens (N, …) of a tensor (…, …) with `own` axes of its own, as a numpy array."""
    x = x if x.dtype == torch.float64 else x.float()
    array: Array = x.flatten(0, x.ndim - own - 1).cpu().numpy()
    return array
