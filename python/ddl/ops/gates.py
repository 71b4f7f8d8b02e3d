"""The gates β and α of a caller as the records of an operator have them: in one tensor, β first."""

from __future__ import annotations

from typing import TypeVar

import torch
from torch import Tensor

from ddl.results import ERASE, ReadParameters, ReadResult, RewriteReadResult, Write

from .checks import (
    check_gate,
    check_is_dense,
    check_is_tensor,
    check_shape,
    check_stored,
    gate_dtype,
)

__all__ = ["as_gate", "with_alpha", "with_erase", "write_of"]

HALF = (torch.bfloat16, torch.float16)
Result = TypeVar("Result", ReadResult, RewriteReadResult)


def as_gate(name: str, gate: Tensor, state: Tensor) -> Tensor:
    """Convert a value or gate in half precision to the dtype that the operators take."""
    if getattr(gate, "dtype", None) not in HALF:
        return gate  # the operator refuses what does not fit
    check_is_tensor("state", state)
    check_is_tensor(name, gate)
    return gate.to(gate_dtype(state))


def write_of(
    state: Tensor,
    direction: Tensor,
    value: Tensor,
    gate: Tensor,
    eps_k: float | None,
    erase: str | Tensor,
) -> Write:
    """The record of a rewrite whose α, if it is a tensor, follows β in the record's gate."""
    if not isinstance(erase, Tensor):
        if erase not in ERASE[:2]:
            kind = ValueError if isinstance(erase, str) else TypeError
            raise kind(f'`erase` must be "tied", "none" or a tensor, got {erase!r}')
        return Write(direction, value, gate, eps_k, erase)
    check_is_dense("state", state)
    check_is_dense("direction", direction)
    several = direction.ndim == state.ndim
    shape = (*state.shape[:-2], *(direction.shape[-2:-1] if several else ()))
    both = []
    for name, given in (("gate", gate), ("erase", erase)):
        check_is_dense(name, given)
        check_shape(name, given, shape)
        given = as_gate(name, given, state)
        check_gate(name, given, state)
        both.append(given)
    return Write(direction, value, torch.stack(both, -2 if several else -1), eps_k, "separate")


def with_erase(
    state: Tensor, parameters: ReadParameters, weight: Tensor | None, bias: Tensor | None
) -> ReadParameters:
    """The parameters with those of α after those of β."""
    if weight is None:
        if bias is not None:
            text = "`erase_bias` must come with `erase_weight`, got None for `erase_weight`"
            raise ValueError(text)
        return parameters
    of_beta, bias_of_beta = parameters.gate_weight, parameters.gate_bias
    if of_beta is None or (bias is None) != (bias_of_beta is None):
        other = "erase_bias" if bias is None else "gate_bias"
        missing = "gate_weight" if of_beta is None else other
        raise ValueError(f"`erase_weight` must come with `{missing}`, got None for `{missing}`")
    check_is_dense("state", state)
    check_is_dense("gate_weight", of_beta)
    shape = (*of_beta.shape[:-1], state.shape[-2])
    weights = _both(state, shape, gate_weight=of_beta, erase_weight=weight)
    biases = None
    if bias is not None and bias_of_beta is not None:
        biases = _both(state, shape[:-1], gate_bias=bias_of_beta, erase_bias=bias)
    return parameters._replace(gate_weight=weights, gate_bias=biases, next_erase="separate")


def _both(state: Tensor, shape: tuple[int, ...], **parameters: Tensor) -> Tensor:
    """Stack the parameters of β and α, after the checks of each."""
    for name, tensor in parameters.items():
        check_is_dense(name, tensor)
        check_shape(name, tensor, shape)
        check_stored(name, tensor, state)
    return torch.stack(list(parameters.values()))


def with_alpha(result: Result, erase_weight: Tensor | None) -> Result:
    """The result with β and α in fields of their own."""
    if erase_weight is None:
        return result
    gate = result.gate
    assert gate is not None
    beta, alpha = gate.unbind(-erase_weight.ndim)
    return result._replace(gate=beta, erase=alpha)
