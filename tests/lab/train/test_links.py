"""A run directory, or the folder of its checkpoints, may be a link to another disk."""

from __future__ import annotations

from pathlib import Path

import pytest

from ddl.lab.config import TrainConfig
from ddl.lab.train import train
from ddl.lab.train.runs import RunDirectory
from tests.support.train_cases import quiet


@pytest.mark.parametrize("name", ["", "checkpoints"])
def test_a_resumed_run(stopped: TrainConfig, name: str, tmp_path: Path) -> None:
    link = stopped.directory / name
    link.rename(tmp_path / "moved")
    link.symlink_to(tmp_path / "moved")
    train(stopped, quiet())
    assert link.is_symlink()
    assert RunDirectory(stopped.directory).steps() == [6]
