"""Fixtures of the tests of training."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from ddl.lab.config import TrainConfig
from ddl.lab.train import train
from tests.support.train_cases import quiet, short, stop_at


@pytest.fixture(scope="session")
def trained_in_part(tmp_path_factory: pytest.TempPathFactory) -> TrainConfig:
    """The configuration of a run that was stopped after 3 of 6 steps; no test may change it."""
    folder = tmp_path_factory.mktemp("stopped")
    text = folder / "text.txt"
    text.write_text("The delta rule erases what it overwrites. " * 100)
    config = short(folder, "additive", data=str(text), eval_every=6)
    with pytest.MonkeyPatch.context() as patch:
        stop_at(3, patch)
        train(config, quiet())
    return config


@pytest.fixture
def stopped(trained_in_part: TrainConfig, tmp_path: Path) -> TrainConfig:
    """The configuration that resumes a copy of that run, on a copy of its text."""
    text, out = tmp_path / "text.txt", tmp_path / "run"
    shutil.copy(trained_in_part.data or "", text)
    shutil.copytree(trained_in_part.directory, out)
    return replace(trained_in_part, data=str(text), out=out, resume="auto")
