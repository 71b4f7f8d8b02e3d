"""A process group outlives the run: DDP's reducer must not be the last to hold it."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path

import torch

from ddl.lab.train.processes import joined
from tests.support.processes import together


def test_it_outlives_the_run(tmp_path: Path) -> None:
    def act(rank: int) -> None:
        with joined(1):
            group = weakref.ref(torch.distributed.group.WORLD)
        gc.collect()
        assert not torch.distributed.is_initialized()
        assert group() is not None

    together(2, tmp_path, act)
