"""Kernels that a computation on real tensors asks for."""

from __future__ import annotations

from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

from ddl.cuda import alignment
from ddl.ops.declarations import OPERATORS
from ddl.ops.refusals import described


class Listing(TorchDispatchMode):
    """Adds the kernels of operators that are called within it to a `_native.Warmup`."""

    def __init__(self, warmup: Any) -> None:
        super().__init__()
        self.warmup = warmup

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        namespace, _, name = func.name().partition("::")
        if namespace == "ddl":
            declared = {operator.name: operator for operator in OPERATORS}
            operator = declared[name.partition(".")[0]]  # without the overload
            self.warmup.add(operator.name, described(operator, args, alignment))
        return func(*args, **(kwargs or {}))
