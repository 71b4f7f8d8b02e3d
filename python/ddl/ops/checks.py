"""Dtypes of an operator's tensors, and checks of tensors that native code does not see.

Native code checks the arguments of operators (src/problem/).
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

STORED = (torch.float32, torch.bfloat16, torch.float16)


def gate_dtype(state: Tensor) -> torch.dtype:
    """The dtype of values, gates and statistics: float64 for a float64 state, else float32."""
    return torch.float64 if state.dtype == torch.float64 else torch.float32


def stored_dtypes(state: Tensor) -> tuple[torch.dtype, ...]:
    """The dtypes of tensors that go with a state's."""
    return (torch.float64,) if state.dtype == torch.float64 else STORED


def as_gate(gate: Any, state: Tensor) -> Any:
    """Convert a value or gate in half precision to the dtype that the operators take."""
    if getattr(gate, "dtype", None) not in STORED[1:]:
        return gate  # the operator refuses what does not fit
    check_is_tensor("state", state)
    return gate.to(gate_dtype(state))


def autocast_dtype(tensor: Tensor) -> torch.dtype | None:
    """Return autocast's dtype for a tensor; None if autocast is off there, or leaves it alone."""
    device = tensor.device.type
    if tensor.dtype == torch.float64 or device == "meta":  # meta tensors have no autocast
        return None
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None


def check_is_tensor(name: str, tensor: Any, must: str = "be") -> None:
    """Raise TypeError unless `tensor`, which an argument must "be" or "return", is a Tensor."""
    if not isinstance(tensor, Tensor):
        raise TypeError(f"`{name}` must {must} a torch.Tensor, got {type(tensor).__name__}")


def is_distributed(tensor: Tensor) -> bool:
    """Whether a tensor is a DTensor, of which each process has a part."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def check_is_plain(name: str, tensor: Any, must: str = "be") -> None:
    """Do as `check_is_tensor`; raise TypeError for a DTensor, too."""
    check_is_tensor(name, tensor, must)
    if is_distributed(tensor):
        raise TypeError(
            f"`{name}` must {must} a plain tensor, got a DTensor, of which each process has a part:"
            " the stream can be sharded as a whole, by fully_shard, but neither tensor nor"
            " sequence parallelism over it is there"
        )


def check_is_dense(name: str, tensor: Any) -> None:
    """Raise TypeError unless `tensor` is a dense torch.Tensor."""
    check_is_plain(name, tensor)
    if tensor.is_nested or tensor.layout is not torch.strided:
        got = "a nested tensor" if tensor.is_nested else f"layout {tensor.layout}"
        raise TypeError(f"`{name}` must be a dense tensor, got {got}")


def check_shape(name: str, tensor: Tensor, expected: Sequence[Any]) -> None:
    """Raise ValueError unless `tensor` has shape `expected`."""
    if tuple(tensor.shape) != tuple(expected):
        raise ValueError(f"`{name}` must have shape {tuple(expected)}, got {tuple(tensor.shape)}")


def check_dtype(name: str, tensor: Tensor) -> None:
    """Raise TypeError unless the operators support the dtype of `tensor`."""
    if tensor.dtype not in STORED and tensor.dtype != torch.float64:
        raise TypeError(
            f"`{name}` must have dtype float32, float64, bfloat16 or float16, got {tensor.dtype}"
        )


def check_stored(name: str, tensor: Tensor, state: Tensor) -> None:
    """Raise unless `tensor` is on the state's device, in a dtype that mixes with the state's."""
    if tensor.device != state.device:
        raise ValueError(f"`{name}` must be on {state.device}, got a tensor on {tensor.device}")
    check_dtype(name, tensor)
    if tensor.dtype not in stored_dtypes(state):
        expected = " or ".join(map(str, stored_dtypes(state)))
        raise TypeError(f"`{name}` must have dtype {expected}, got {tensor.dtype}")


def check_mask(name: str, mask: Any, batch: Sequence[Any], beside: Tensor) -> None:
    """Raise unless `mask` is a bool tensor of shape `batch` on the device of `beside`."""
    check_is_dense(name, mask)
    if mask.dtype != torch.bool:
        raise TypeError(f"`{name}` must have dtype torch.bool, got {mask.dtype}")
    check_shape(name, mask, batch)
    if mask.device != beside.device:
        raise ValueError(f"`{name}` must be on {beside.device}, got a tensor on {mask.device}")


def check_context_dtype(state: Tensor, dtype: Any) -> None:
    """Raise TypeError unless `dtype` is None or a context of this state can have it."""
    if dtype is not None and dtype not in stored_dtypes(state):
        expected = " or ".join(map(str, stored_dtypes(state)))
        raise TypeError(f"`context_dtype` must be {expected}, got {dtype!r}")
