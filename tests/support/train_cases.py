"""Helpers of the training tests: a configuration that trains in seconds, and consoles."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from ddl.config import PRESETS, TrainConfig


def short(tmp_path: Path, residual: str = "ddl-cc", **changes: object) -> TrainConfig:
    base = PRESETS["tiny"]
    fields = {"steps": 6, "eval_every": 3, "log_every": 2, "eval_batches": 2, "device": "cpu"}
    model = replace(base.model, residual=residual, block_size=32, hidden_size=32)
    return replace(base, model=model, **({"out": tmp_path / "run"} | fields | changes))


def quiet() -> Console:
    return Console(quiet=True)


def recorder() -> Console:
    return Console(record=True, file=io.StringIO(), width=120)
