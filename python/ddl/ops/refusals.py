"""The exceptions of a refused call.

Native code refuses by a C++ exception, which torch turns into a RuntimeError with its sentence. The
type that belongs to it is found here, after the fact: a call that succeeds pays nothing.
"""

from __future__ import annotations

from typing import Any

import torch

from ddl import _native

from .checks import CHECKS
from .declarations import Operator


def refused(operator: Operator, values: tuple[Any, ...], error: Exception) -> Exception:
    """Return the exception to raise for `error`, which torch raised in a call of `operator`.

    Raises instead what names an argument: ValueError for a shape, device or number, TypeError for a
    dtype or layout, and torch's own exception if it is out of memory.
    """
    refusal = _native.take_refusal(str(error))
    if check := CHECKS.get(operator.name):
        check(operator.Arguments(*values))
    if refusal is None:
        return error
    exception, memory = refusal
    if memory is not None:
        size, device = memory
        torch.empty(size, dtype=torch.uint8, device=device)  # raises torch's own exception
    return exception
