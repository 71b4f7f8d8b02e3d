"""Values and gates of a caller in the dtype that the operators take."""

from __future__ import annotations

import torch
from torch import Tensor

from .checks import check_is_tensor, gate_dtype

__all__ = ["as_gate"]

HALF = (torch.bfloat16, torch.float16)


def as_gate(name: str, gate: Tensor, state: Tensor) -> Tensor:
    """Convert a value or gate in half precision to the dtype that the operators take."""
    if getattr(gate, "dtype", None) not in HALF:
        return gate  # the operator refuses what does not fit
    check_is_tensor("state", state)
    check_is_tensor(name, gate)
    return gate.to(gate_dtype(state))
