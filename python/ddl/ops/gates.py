"""The mean gate β of the rewrites that a call does, seen at the operators."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .autograd import OVERLOADS
from .declarations import OPERATORS
from .private import fake_tensor_tools

# Operators that rewrite → the place of the gate among their arguments.
GATE: dict[Any, int] = {
    OVERLOADS[operator.name]: operator.names.index("gate")
    for operator in OPERATORS
    if "gate" in operator.names and operator.name in OVERLOADS
}


def mean_gate(run: Callable[[], object]) -> float | None:
    """Mean β over the tokens of every rewrite that `run` does; None if it does none.

    run: calls a model that is not compiled, on the CPU or a GPU.
    """
    gates: list[Tensor] = []

    class Seeing(fake_tensor_tools().dispatch_mode):  # type: ignore[misc]
        def __torch_dispatch__(
            self, operator: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            if operator in GATE:
                gates.append(args[GATE[operator]].float().mean())
            return operator(*args, **(kwargs or {}))

    with torch.no_grad(), Seeing():
        run()
    return float(torch.stack(gates).mean()) if gates else None
