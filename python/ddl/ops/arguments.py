"""The check of a whole call of each operator, from the checks of its arguments."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from . import declarations
from .checks import (
    check_before,
    check_chain,
    check_expand,
    check_is_dense,
    check_pending,
    check_read,
    check_rewrite,
)
from .declarations import Operator
from .delta_rule import check_delta_rule


def _check_tensors(operator: Operator, given: Any) -> None:
    """Check that the arguments which an operator declares as tensors are dense tensors."""
    for name in operator.tensors:
        tensor = getattr(given, name)
        if tensor is not None or name not in operator.optional:
            check_is_dense(name, tensor)


def _all_of(operator: Operator, *checks: Callable[[Any], None]) -> Callable[[Any], None]:
    def check(given: Any) -> None:
        _check_tensors(operator, given)
        for each in checks:
            each(given)

    return check


# Operator name → check of a call's arguments, by name.
CHECKS = {
    "rewrite": _all_of(declarations.rewrite, check_rewrite),
    "read": _all_of(declarations.read, check_read),
    "rewrite_read": _all_of(declarations.rewrite_read, check_rewrite, check_read, check_chain),
    "expand": _all_of(declarations.expand, check_expand),
    "delta_rule": _all_of(declarations.delta_rule, check_delta_rule),
    "cached_read": _all_of(declarations.cached_read, check_read, check_pending),
    "cached_rewrite_read": _all_of(
        declarations.cached_rewrite_read, check_rewrite, check_read, check_pending
    ),
    "cached_expand": _all_of(declarations.cached_expand, check_expand, check_before),
}
