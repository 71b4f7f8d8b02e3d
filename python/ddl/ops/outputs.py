"""The outputs of every operator: one function per operator allocates them uninitialised.

The fake implementation of an operator is that function, after a check of the arguments if the real
one has its own; the real one fills the tensors that it returns.
If an output is absent (no gate requested, nothing to save), an empty uint8 tensor stands in for it,
because operator schemas have no optional outputs.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .checks import check_context_dtype, check_expand, check_state


def gate_dtype(state: Tensor) -> torch.dtype:
    """The dtype of values, gates and statistics: float64 for a float64 state, else float32."""
    return torch.float64 if state.dtype == torch.float64 else torch.float32


def _absent(state: Tensor) -> Tensor:
    return state.new_empty(0, dtype=torch.uint8)  # no real output has this dtype


def is_absent(tensor: Tensor) -> bool:
    """Return whether `tensor` stands in for an absent output."""
    return tensor.dtype == torch.uint8


def _like(tensor: Tensor) -> Tensor:
    return torch.empty_like(tensor, memory_format=torch.contiguous_format)


def _like_or_absent(tensor: Tensor | None, state: Tensor) -> Tensor:
    return _absent(state) if tensor is None else _like(tensor)


def rewrite(state: Tensor, *_rewrite: Any) -> tuple[Tensor, Tensor]:
    check_state(state)
    *batch, _, m = state.shape
    return _like(state), state.new_empty((*batch, 1 + m), dtype=gate_dtype(state))


def read(state: Tensor, *arguments: Any) -> tuple[Tensor, ...]:
    compress, _, norm_eps, gate_weight, _, value_weight, _, _, _, context_dtype = arguments
    check_state(state)
    check_context_dtype(state, context_dtype)
    *batch, d, m = state.shape
    new, real = state.new_empty, gate_dtype(state)
    return (
        new((*batch, d), dtype=context_dtype),  # None means the state's dtype
        _absent(state) if value_weight is None else new((*batch, m), dtype=real),
        _absent(state) if gate_weight is None else new(batch, dtype=real),
        # x keeps the state's dtype: a narrower context dtype would round or overflow it before
        # the norm.
        _absent(state) if compress is None or compress.ndim < 3 else new((*batch, d)),
        _absent(state) if norm_eps is None else new(batch, dtype=real),
    )


def rewrite_read(state: Tensor, *arguments: Any) -> tuple[Tensor, ...]:
    new_state, stats = rewrite(state)
    return (new_state, *read(state, *arguments[4:]), stats)


def expand(x: Tensor, weight: Tensor | None, value_channels: int) -> Tensor:
    check_expand(x, weight, value_channels)
    return x.new_empty((*x.shape, value_channels))


def rewrite_backward(grad_state: Tensor, *inputs: Any) -> tuple[Tensor, ...]:
    return tuple(map(_like, inputs[:4]))


def _parameter_gradients(state: Tensor, read: tuple[Any, ...]) -> tuple[Tensor, ...]:
    compress, norm_weight, _, gate_weight, gate_bias, value_weight, value_bias = read[:7]
    parameters = (compress, norm_weight, gate_weight, gate_bias, value_weight, value_bias)
    return tuple(_like_or_absent(parameter, state) for parameter in parameters)


def read_backward(*arguments: Any) -> tuple[Tensor, ...]:
    state = arguments[3]
    return (_like(state), *_parameter_gradients(state, arguments[4:13]))


def rewrite_read_backward(*arguments: Any) -> tuple[Tensor, ...]:
    return (_like(arguments[4]), *rewrite_read_backward_in_place(*arguments))


def rewrite_read_backward_in_place(*arguments: Any) -> tuple[Tensor, ...]:
    state, *rest = arguments[4:]
    return (*map(_like, rest[:3]), *_parameter_gradients(state, tuple(rest[4:13])))


def expand_backward(grad_state: Tensor, x: Tensor, weight: Tensor | None) -> tuple[Tensor, Tensor]:
    return _like(x), _like_or_absent(weight, x)
