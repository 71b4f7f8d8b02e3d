"""The operators in plain PyTorch, as on a device without kernels."""

from __future__ import annotations

from typing import Any, NoReturn

import pytest

from ddl.ops import devices
from ddl.ops.autograd import call_of
from ddl.ops.declarations import FORWARDS
from ddl.ops.plain import or_plain


def run_plain(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the CPU a device without kernels; `devices._KNOWN` decides if that warns."""

    def kernel(*_: Any) -> NoReturn:
        raise NotImplementedError("Could not run an operator on this device")

    monkeypatch.setattr(devices, "WITH_KERNELS", ("meta",))
    for operator in FORWARDS:
        call = call_of(operator, kernel, or_plain(operator, kernel))
        monkeypatch.setattr(operator, "call", call)
