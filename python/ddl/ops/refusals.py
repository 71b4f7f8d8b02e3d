"""The exceptions of a refused call.

Native code refuses by a C++ exception, which torch turns into a RuntimeError with its sentence. The
type that belongs to it is found here, after the fact: a call that succeeds pays nothing.
"""

from __future__ import annotations

from typing import Any, NoReturn

import torch

from ddl import _native

from .arguments import CHECKS
from .declarations import Operator


def raise_refusal(operator: Operator, values: tuple[Any, ...], error: Exception) -> NoReturn:
    """Raise what belongs to `error`, which torch raised in a call of `operator`.

    If a check finds an argument at fault: ValueError for a shape, device or number, TypeError for a
    dtype or layout. Else what native code refused by, or torch's own exception if it is out of
    memory, or `error` itself.
    """
    refusal = _native.take_refusal(str(error))
    if check := CHECKS.get(operator.name):
        check(operator.Arguments(*values))
    if refusal is None:
        raise error
    exception, memory = refusal
    if memory is not None:
        size, device = memory
        torch.empty(min(size, 2**63 - 1), dtype=torch.uint8, device=device)  # raises torch's own
    raise exception from None
