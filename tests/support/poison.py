"""Memory that nobody has written is NaN."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def poisoned() -> Iterator[None]:
    """Fill what `torch.empty` allocates with NaN, so that a number that nobody writes is seen."""
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)
