"""`torchrun -m ddl train` with a GPU for each process does what one process does."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from ddl.lab.train.runs import RunDirectory

COUNT = 2
SHORT = (
    *("tiny", "--steps", "6", "--eval-every", "3", "--log-every", "1", "--eval-batches", "2"),
    *("--accumulation", "2", "--precision", "float32", "--device", "cuda"),
)


def losses(run: Path) -> list[float]:
    records = RunDirectory(run).metrics.read()
    return [r[kind] for r in records for kind in ("loss", "validation_loss") if kind in r]


def start(*arguments: str) -> None:
    subprocess.run([sys.executable, "-m", *arguments], check=True, timeout=300)


@pytest.mark.skipif(torch.cuda.device_count() < COUNT, reason=f"needs {COUNT} GPUs")
@pytest.mark.parametrize("how", ["ddp", "fsdp2"])
def test_training(tmp_path: Path, how: str) -> None:
    torchrun = ("torch.distributed.run", "--nproc-per-node", str(COUNT), "--standalone", "-m")
    command = ("ddl", "train", *SHORT)
    start(*command, "--out", str(tmp_path / "one"))
    start(*torchrun, *command, "--out", str(tmp_path / "two"), "--parallel", how)
    assert losses(tmp_path / "two") == pytest.approx(losses(tmp_path / "one"), rel=1e-4)
