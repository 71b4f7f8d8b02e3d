"""Fixtures of the tests of nanoGPT's model."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture
def fresh_compiler() -> Iterator[None]:
    """Reset Dynamo, because all models share one forward, whose recompilations are limited."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()
