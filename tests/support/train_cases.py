"""Helpers of the training tests: a configuration that trains in seconds, consoles, signals."""

from __future__ import annotations

import io
import json
import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from ddl.lab.config import PRESETS, TrainConfig
from ddl.lab.data.shards import TOKENIZER, tokenizer_sum
from ddl.lab.train import Trainer
from ddl.models.tokenizers import Tokenizer, describe


def short(tmp_path: Path, residual: str = "ddl-cc", **changes: object) -> TrainConfig:
    """The preset `tiny`, of width 32 and with 6 steps, into `tmp_path`/run."""
    base = PRESETS["tiny"]
    fields = {"steps": 6, "eval_every": 3, "log_every": 2, "eval_batches": 2, "device": "cpu"}
    model = replace(base.model, residual=residual, block_size=32, hidden_size=32)
    return replace(base, model=model, **({"out": tmp_path / "run"} | fields | changes))


def quiet() -> Console:
    return Console(quiet=True)


def recorder() -> Console:
    return Console(record=True, file=io.StringIO(), width=120)


def stop_at(step: int, monkeypatch: pytest.MonkeyPatch, number: int = signal.SIGTERM) -> None:
    """Send this process a signal while the trainer does a step."""
    original = Trainer.step

    def patched(self: Trainer, *flags: Any) -> Any:
        if self.steps_done + 1 == step:
            os.kill(os.getpid(), number)
        return original(self, *flags)

    monkeypatch.setattr(Trainer, "step", patched)


def exchange_tokenizer(run: Path, tokenizer: Tokenizer) -> None:
    """Give a run another tokenizer, as if it had been trained with it."""
    (run / TOKENIZER).write_text(json.dumps(describe(tokenizer)))
    for file in run.glob("checkpoints/*/manifest.json"):
        values = json.loads(file.read_text()) | {"tokenizer": tokenizer_sum(tokenizer)}
        file.write_text(json.dumps(values))
