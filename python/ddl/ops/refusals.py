"""Errors for calls that torch or native code refused, found after the fact: a call that succeeds
pays nothing.

Native code refuses by a C++ exception, which torch turns into a RuntimeError with its sentence. The
type that belongs to it is found here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.autograd import forward_ad

from ddl import _native

from .checks import check_is_dense
from .declarations import Operator

SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool)


def check(operator: Operator, values: Sequence[Any]) -> None:
    """Check a call's arguments without their data.

    ValueError for a shape, device or number, TypeError for a dtype or layout. Symbolic sizes are
    not checked: native code would fix their values.
    """
    for (name, kind), value in zip(operator.kinds.items(), values, strict=True):
        if kind == "Tensor" or (kind == "Tensor?" and value is not None):
            check_is_dense(name, value)
    if not _is_symbolic(values):
        _native.check(operator.name, described(operator, values, lambda tensor: str(tensor.device)))


def _is_symbolic(value: Any) -> bool:
    if isinstance(value, Tensor):
        value = value.shape
    if isinstance(value, (list, tuple)):
        return any(map(_is_symbolic, value))
    return isinstance(value, SYMBOLIC)


def described(
    operator: Operator, values: Sequence[Any], place: Callable[[Tensor], Any]
) -> dict[str, Any]:
    """Describe arguments to native code by name: a tensor by its shape, dtype and place, a dtype by
    its name; others are passed on."""

    def describe(value: Any) -> Any:
        if isinstance(value, (list, tuple)):
            return [describe(each) for each in value]
        if isinstance(value, torch.dtype):
            return str(value).removeprefix("torch.")
        if not isinstance(value, Tensor):
            return value
        return list(value.shape), describe(value.dtype), place(value)

    return dict(zip(operator.names, map(describe, values), strict=False))


def raise_refusal(operator: Operator, values: tuple[Any, ...], error: Exception) -> NoReturn:
    """Raise what belongs to `error`, which torch raised in a call of `operator`.

    That is what native code refused the call by, torch's own exception if it is out of memory, what
    the check of the arguments says, or `error` itself.
    """
    if "functorch transforms" in str(error):
        refuse_transforms()
    if isinstance(error, NotImplementedError):
        refuse_tangents(operator, values)
    refusal = _native.take_refusal(str(error))
    check(operator, values)  # it knows the names of torch's dtypes and devices
    if refusal is None:
        raise error
    exception, memory = refusal
    if memory is not None:
        size, device = memory
        torch.empty(min(size, 2**63 - 1), dtype=torch.uint8, device=device)  # raises torch's own
    raise exception from None


def refuse_transforms(*_: Any, **__: Any) -> NoReturn:
    """Raise NotImplementedError: the implementation of all operators under torch.func."""
    raise NotImplementedError(
        "the fused operators must be called outside of torch.func transforms "
        "(vmap, grad, vjp, jvp, …), got a call inside one: only the functions of `ddl.reference` "
        "can be called there"
    )


def refuse_tangents(operator: Operator, values: Sequence[Any]) -> None:
    """Raise NotImplementedError for a tensor with a forward-mode tangent."""
    for name, value in zip(operator.names, values, strict=True):
        if isinstance(value, Tensor) and forward_ad.unpack_dual(value).tangent is not None:
            raise NotImplementedError(
                f"`{name}` must come without a forward-mode tangent, got a dual tensor: the fused "
                "operators have reverse-mode derivatives only, unlike the functions of "
                "`ddl.reference`"
            )
