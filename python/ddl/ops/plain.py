"""The operators in plain PyTorch, for devices without kernels: checks, then `ddl.reference`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from ddl import reference

from . import declarations
from .checks import CHECKS
from .declarations import Operator

_READ = [
    name
    for name in declarations.read.names
    if name not in ("state", "value_from_compressed", "context_dtype")
]


def _rewrite(given: Any) -> tuple[Tensor]:
    state = reference.rewrite(
        given.state, given.direction, given.value, given.gate, eps_k=given.eps_k
    )
    return (state,)


def _read(given: Any, state: Tensor | None = None) -> tuple[Tensor | None, ...]:
    return reference.read(
        given.state if state is None else state,
        **{name: getattr(given, name) for name in _READ},
        value_from="compressed" if given.value_from_compressed else "context",
        context_dtype=given.context_dtype,
    )


def _rewrite_read(given: Any) -> tuple[Tensor | None, ...]:
    (new_state,) = _rewrite(given)
    return (new_state, None, *_read(given, new_state))


def _expand(given: Any) -> Tensor:
    return reference.expand(given.x, given.weight, value_channels=given.value_channels)


_PLAIN: dict[str, Callable[[Any], Any]] = {
    "rewrite": _rewrite,
    "read": _read,
    "rewrite_read": _rewrite_read,
    "expand": _expand,
}


def run_plain(operator: Operator, given: Any) -> Any:
    """Return the operator's outputs, None for those without gradients."""
    CHECKS[operator.name](given)
    outputs = _PLAIN[operator.name](given)
    if not isinstance(outputs, tuple):
        return outputs
    return (*outputs, *[None] * (len(operator.outputs) - len(outputs)))
