"""Argument checks as sentences, for tensors without data and for what native code never sees.

Real tensors are checked natively (src/problem.rs), where it costs nothing; the sentences are the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

STORED = (torch.float32, torch.bfloat16, torch.float16)


def check_tensors(**tensors: Any) -> None:
    """Every argument that is not None is a dense tensor outside of functional transforms.

    Raises TypeError, or NotImplementedError under forward-mode differentiation and torch.func.
    """
    for name, tensor in tensors.items():
        if tensor is None:
            continue
        if not isinstance(tensor, Tensor):
            raise TypeError(f"`{name}` must be a torch.Tensor, got {type(tensor).__name__}")
        if tensor.layout is not torch.strided:
            raise TypeError(f"`{name}` must be a dense tensor, got layout {tensor.layout}")
    if torch.compiler.is_compiling():
        return
    if torch.autograd.forward_ad._current_level >= 0:
        _refuse_tangents(tensors)
    if torch._C._are_functorch_transforms_active():
        raise NotImplementedError(
            "the fused operators must be called outside of torch.func transforms "
            "(vmap, grad, vjp, jvp, …), got a call inside one: use `ddl.reference` there"
        )


def _refuse_tangents(tensors: dict[str, Any]) -> None:
    """A custom operator would drop a tangent without a word; say so instead."""
    for name, tensor in tensors.items():
        if isinstance(tensor, Tensor) and torch.autograd.forward_ad.unpack_dual(tensor).tangent is not None:
            raise NotImplementedError(
                f"`{name}` must come without a forward-mode tangent, got a dual tensor: "
                "the fused operators have reverse-mode derivatives only, use `ddl.reference`"
            )


def check_shape(name: str, tensor: Tensor, expected: Sequence[Any]) -> None:
    """Raises ValueError unless `tensor` has shape `expected`."""
    if tuple(tensor.shape) != tuple(expected):
        raise ValueError(f"`{name}` must have shape {tuple(expected)}, got {tuple(tensor.shape)}")


def check_stored(name: str, tensor: Tensor, state: Tensor) -> None:
    """Raises unless `tensor` is on the state's device, in a dtype that goes with the state's."""
    if tensor.device != state.device:
        raise ValueError(f"`{name}` must be on {state.device}, got a tensor on {tensor.device}")
    allowed = (torch.float64,) if state.dtype == torch.float64 else STORED
    if tensor.dtype not in allowed:
        names = " or ".join(map(str, allowed))
        raise TypeError(f"`{name}` must have dtype {names}, got {tensor.dtype}")


def check_state(state: Tensor, *, over_time: bool = False) -> None:
    """Raises unless `state` is (…, d, m), with a time axis before these where one is needed."""
    expected = "(…, time, hidden_size, value_channels)" if over_time else "(…, hidden_size, value_channels)"
    if state.ndim < 2 + over_time or 0 in state.shape[-2:]:
        raise ValueError(f"`state` must have shape {expected}, got {tuple(state.shape)}")
    if state.dtype not in (*STORED, torch.float64):
        raise TypeError(
            f"`state` must have dtype float32, float64, bfloat16 or float16, got {state.dtype}"
        )


def check_rewrite(
    state: Tensor, direction: Tensor, value: Tensor, gate: Tensor, eps_k: float
) -> None:
    """Checks the arguments of a rewrite."""
    check_state(state)
    *batch, d, m = state.shape
    for name, tensor, shape in (
        ("direction", direction, (*batch, d)),
        ("value", value, (*batch, m)),
        ("gate", gate, tuple(batch)),
    ):
        check_shape(name, tensor, shape)
        check_stored(name, tensor, state)
    check_positive("eps_k", eps_k)


def check_read(
    state: Tensor,
    compress: Tensor | None,
    norm_weight: Tensor | None,
    norm_eps: float | None,
    gate_weight: Tensor | None,
    gate_bias: Tensor | None,
    value_weight: Tensor | None,
    value_bias: Tensor | None,
    value_scale: float | None,
    value_from_compressed: bool,
) -> None:
    """Checks the arguments of a read."""
    over_time = compress is not None and compress.ndim == 3
    check_state(state, over_time=over_time)
    d, m = state.shape[-2:]
    if compress is None and m != 1:
        raise ValueError(
            f"`compress` must be a weight of shape ({d}, {m}) or ({d}, {m}, K) "
            f"for {m} value channels, got None"
        )
    taps = compress.shape[2:] if compress is not None else ()
    for name, tensor, shape in (
        ("compress", compress, (d, m, *taps)),
        ("norm_weight", norm_weight, (d,)),
        ("gate_weight", gate_weight, (d,)),
        ("gate_bias", gate_bias, ()),
        ("value_weight", value_weight, (m, d)),
        ("value_bias", value_bias, (m,)),
    ):
        if tensor is not None:
            check_shape(name, tensor, shape)
            check_stored(name, tensor, state)
    check_positive("norm_eps", norm_eps)
    check_positive("value_scale", value_scale)


def check_expand(x: Tensor, weight: Tensor | None, value_channels: int) -> None:
    """Checks the arguments of an expansion."""
    if value_channels < 1:
        raise ValueError(f"`value_channels` must be at least 1, got {value_channels}")
    needed = 1 if weight is None else 2
    if x.ndim < needed or x.shape[-1] == 0:
        expected = "(…, hidden_size)" if weight is None else "(…, time, hidden_size)"
        raise ValueError(f"`x` must have shape {expected}, got {tuple(x.shape)}")
    if weight is None:
        return
    d, m = x.shape[-1], value_channels
    if weight.ndim != 3 or weight.shape[2] == 0:
        raise ValueError(f"`weight` must have shape ({d}, {m}, K), got {tuple(weight.shape)}")
    check_shape("weight", weight, (d, m, weight.shape[2]))
    check_stored("weight", weight, x)


def check_positive(name: str, number: float | None) -> None:
    """Raises ValueError unless `number` is None or positive and finite."""
    if number is not None and not 0 < number < float("inf"):
        raise ValueError(f"`{name}` must be a positive finite number, got {number}")


def check_count(name: str, number: int) -> None:
    """Raises ValueError unless `number` is an integer of at least 1."""
    if not isinstance(number, int) or isinstance(number, bool) or number < 1:
        raise ValueError(f"`{name}` must be an integer of at least 1, got {number!r}")


def check_choice(name: str, choice: str, choices: Sequence[str]) -> None:
    """Raises ValueError unless `choice` is one of `choices`."""
    if choice not in choices:
        known = " or ".join(f'"{known}"' for known in choices)
        raise ValueError(f"`{name}` must be {known}, got {choice!r}")
