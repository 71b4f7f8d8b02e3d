"""Fake implementations: the outputs of every operator, with shapes and dtypes and without data.

They run for torch.compile, export and the meta device, and check arguments with the sentences of
native code, which checks and allocates for real tensors.
If an output is absent (no gate requested, nothing to save), an empty uint8 tensor stands in for it,
because operator schemas have no optional outputs.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from . import declarations, delta_rule, private
from .arguments import CHECKS
from .checks import gate_dtype, next_rewrites_of, rewrites_of
from .declarations import OPERATORS, Operator


def _absent(beside: Tensor) -> Tensor:
    return beside.new_empty(0, dtype=torch.uint8)  # no real output has this dtype


def _like(tensor: Tensor) -> Tensor:
    return torch.empty_like(tensor, memory_format=torch.contiguous_format)


def _rewrite(given: Any) -> tuple[Tensor, ...]:
    *batch, _, m = given.state.shape
    n = math.prod(rewrites_of(given))
    stats = (
        n * (1 + m) + n * (n - 1) // 2
    )  # r and p of each, and the products of each two directions
    return _like(given.state), given.state.new_empty((*batch, stats), dtype=gate_dtype(given.state))


def _read(given: Any) -> tuple[Tensor, ...]:
    state, compress = given.state, given.compress
    *batch, d, m = state.shape
    new, real = state.new_empty, gate_dtype(state)
    n = next_rewrites_of(given)
    return (
        new((*batch, d), dtype=given.context_dtype),  # None means the state's dtype
        _absent(state) if given.value_weight is None else new((*batch, *n, m), dtype=real),
        _absent(state) if given.gate_weight is None else new((*batch, *n), dtype=real),
        _absent(state) if compress is None or compress.ndim < 3 else new((*batch, d)),
        _absent(state) if given.norm_eps is None else new(batch, dtype=real),
    )


def _rewrite_read(given: Any) -> tuple[Tensor, ...]:
    return (*_rewrite(given), *_read(given))


def _cached_read(given: Any) -> tuple[Tensor, ...]:
    state, compress = given.state, given.compress
    taps = compress.shape[2] if compress is not None and compress.ndim == 3 else 1
    shape = (*state.shape[:-3], taps - 1, state.shape[-2])
    pending = state.new_empty(shape, dtype=gate_dtype(state)) if taps > 1 else _absent(state)
    return (*_read(given)[:3], pending)


def _cached_rewrite_read(given: Any) -> tuple[Tensor, ...]:
    return (_like(given.state), *_cached_read(given))


def _expand(given: Any) -> Tensor:
    return given.x.new_empty((*given.x.shape, given.value_channels))


def _cached_expand(given: Any) -> tuple[Tensor, ...]:
    x, weight = given.x, given.weight
    taps = 1 if weight is None else weight.shape[2]
    shape = (*x.shape[:-2], taps - 1, x.shape[-1])
    return _expand(given), x.new_empty(shape) if taps > 1 else _absent(x)


def _gradients(operator: Operator) -> Callable[[Any], tuple[Tensor, ...]]:
    """A backward's outputs: like the arguments that they are gradients of, if wanted."""
    named = [output.removeprefix("grad_") for output in operator.outputs]
    # Bit 0 is the state's gradient, which is no output of the backward that overwrites it.
    first = int(operator is declarations.overwriting_backward)

    def fake(given: Any) -> tuple[Tensor, ...]:
        wanted = getattr(given, "wanted", 0)
        beside = given.x if "x" in operator.names else given.state
        return tuple(
            _like(tensor)
            if name not in operator.optional or (tensor is not None and wanted >> bit & 1)
            else _absent(beside)
            for bit, name in enumerate(named, start=first)
            for tensor in (getattr(given, name),)
        )

    return fake


_FAKES: dict[str, Callable[[Any], Any]] = {
    "rewrite": _rewrite,
    "read": _read,
    "rewrite_read": _rewrite_read,
    "expand": _expand,
    "cached_read": _cached_read,
    "cached_rewrite_read": _cached_rewrite_read,
    "cached_expand": _cached_expand,
    "rewrite_backward": _gradients(declarations.rewrite_backward),
    "read_backward": _gradients(declarations.read_backward),
    "rewrite_read_backward": _gradients(declarations.rewrite_read_backward),
    "rewrite_read_backward_": _gradients(declarations.overwriting_backward),
    "expand_backward": _gradients(declarations.expand_backward),
    "delta_rule": delta_rule.outputs,
    "delta_rule_backward": delta_rule.gradients,
}


def fake(operator: Operator) -> Callable[..., Any]:
    """Return the fake implementation of an operator."""
    check = CHECKS.get(operator.name)

    def outputs(*values: Any) -> Any:
        # The fake implementations of a graph always run before inductor lowers it.
        private.allow_inductor_fallback(*(f"ddl::{other.name}" for other in OPERATORS))
        given = operator.Arguments(*values)
        if check is not None:
            check(given)
        return _FAKES[operator.name](given)

    return outputs
