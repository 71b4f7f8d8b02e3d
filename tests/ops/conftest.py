"""Outputs begin as NaN: a number that no kernel writes is seen in every comparison."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.poison import poisoned


@pytest.fixture(autouse=True)
def _poisoned() -> Iterator[None]:
    with poisoned():
        yield
