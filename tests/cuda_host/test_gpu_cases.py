"""The tests of a GPU can make their models: their tables come from tests with other sizes."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn

from ddl import DeltaResidual, DeltaStream
from tests.gpu import test_models as cases
from tests.support.read_cases import name_of


@pytest.mark.parametrize("residual", cases.RESIDUAL_OPTIONS, ids=name_of)
def test_modules_of_every_option(residual: dict[str, Any]) -> None:
    for read in cases.READS:
        DeltaStream(cases.D, [nn.Identity()], **read, **residual)
    for m in (1, 4):
        DeltaResidual(cases.D, m, **residual)
