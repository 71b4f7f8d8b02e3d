"""Threads that warm up modules at once."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest
import torch

from ddl import Expand, cuda
from tests.support.at_once import at_once

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="NVRTC is for Linux")


class Slow(Expand):
    """Its parameters are fake for long enough that another thread would find them so."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        time.sleep(0.02)
        return super().forward(x)


def test_they_share_the_kernels_and_the_module(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its parameters are fake while one of them lists its kernels, and the same afterwards."""
    monkeypatch.setenv("DDL_CACHE_DIR", str(tmp_path))
    module, x = Slow(40, 2, kind="conv"), torch.ones(2, 3, 40)
    before = dict(module.named_parameters())
    lists = at_once(lambda _: cuda.warmup(module, x, architecture="sm_90"))
    assert len(lists[0]) >= 2, "forward and backward"
    fixed = [[kernel._replace(seconds=0, cached=True) for kernel in kernels] for kernels in lists]
    assert all(kernels == fixed[0] for kernels in fixed)
    assert all(parameter is before[name] for name, parameter in module.named_parameters())
    assert len(list(tmp_path.iterdir())) == len(lists[0]), "one entry for each, none unfinished"
