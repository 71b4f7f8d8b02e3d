"""Runs to look at: one that was really trained and inspected, and others from their files alone."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ddl.lab.analysis.inspect_path import inspect_path
from ddl.lab.config import InspectConfig
from ddl.lab.train import train
from tests.support.train_cases import quiet, short


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 6 steps with validation, samples, recordings and an inspection with a prompt."""
    path = tmp_path_factory.mktemp("explore") / "cc"
    config = short(path, "ddl-cc", sample_every=3, record_every=3, log_every=1, out=path)
    train(replace(config, model=replace(config.model, num_layers=2)), quiet())
    inspect_path(InspectConfig(path, tokens=64, prompt="The "), quiet())
    return path


@pytest.fixture
def run(trained: Path, tmp_path: Path) -> Path:
    """A copy of the trained run, in a folder of its own."""
    return copied(trained, tmp_path / "runs" / "cc")


def copied(run: Path, path: Path) -> Path:
    return shutil.copytree(run, path)


def append(
    run: Path, *records: dict[str, Any], name: str = "metrics.jsonl", end: str = "\n"
) -> None:
    """Append records to a file of a run; `end` follows the last."""
    with (run / name).open("a", encoding="utf-8") as file:
        file.write("\n".join(map(json.dumps, records)) + end)


def change_config(run: Path, change: Callable[[dict[str, Any]], None]) -> None:
    config = json.loads((run / "config.json").read_text(encoding="utf-8"))
    change(config)
    (run / "config.json").write_text(json.dumps(config), encoding="utf-8")
