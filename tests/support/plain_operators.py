"""The operators in plain PyTorch, as on a device without kernels."""

from __future__ import annotations

import pytest

from ddl.ops import devices, plain
from ddl.ops.calls import call_of, compiled_call
from ddl.ops.declarations import FORWARDS


def run_plain(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the CPU a device without kernels; `devices._KNOWN` decides if that warns."""
    monkeypatch.setattr(devices, "WITH_KERNELS", ("meta",))
    for operator in FORWARDS:
        kernel, backward = plain.forward(operator), plain.backward(operator)
        compiled = compiled_call(operator, kernel)
        monkeypatch.setattr(operator, "call", call_of(operator, kernel, backward, compiled))
