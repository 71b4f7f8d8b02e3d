"""The operators in plain PyTorch, as on a device without kernels."""

from __future__ import annotations

import pytest

from ddl.ops import devices, plain
from ddl.ops.calls import any_call, eager_call
from ddl.ops.declarations import FORWARDS


def run_plain(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the CPU a device without kernels; `devices._KNOWN` decides if that warns."""
    monkeypatch.setattr(devices, "WITH_KERNELS", ("meta",))
    for operator in FORWARDS:
        kernel, backward = plain.forward(operator), plain.backward(operator)
        eager = eager_call(operator, kernel, backward)
        monkeypatch.setattr(operator, "call", any_call(operator, kernel, eager))
