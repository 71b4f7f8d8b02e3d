"""The run that the tests of resuming begin with."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from ddl.config import TrainConfig
from ddl.train import train
from tests.support.train_cases import quiet, short, stop_at


@pytest.fixture
def stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> TrainConfig:
    """The configuration of a run that was stopped after 3 of 6 steps."""
    text = tmp_path / "text.txt"
    text.write_text("The delta rule erases what it overwrites. " * 100)
    config = short(tmp_path, "additive", data=str(text), eval_every=6)
    with pytest.MonkeyPatch.context() as patch:
        stop_at(3, patch)
        train(config, quiet())
    return replace(config, resume="auto")
