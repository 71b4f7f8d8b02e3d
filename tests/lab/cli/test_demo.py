"""`ddl demo`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from ddl.lab.analysis.compare import runs_at
from ddl.lab.cli.side_by_side import demo
from ddl.lab.config import PRESETS, DemoConfig
from ddl.lab.train.runs import load_run
from tests.support.train_cases import recorder, short

CPU = torch.device("cpu")


def test_demo_compares_two_trainings_that_start_alike(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(PRESETS, "demo", short(tmp_path))
    console, config = recorder(), DemoConfig(steps=2, out=tmp_path, device="cpu")
    pair = demo(config, console, samples=5)
    text = console.export_text()
    assert [c.name for c in pair] == ["additive", "ddl-tc"]
    for piece in (
        "validation loss",
        "tokens/s",
        "speed ratio",
        "is better after 2 steps",
        "additive writes",
    ):
        assert piece in text
    assert str(tmp_path / "loss.png") in text
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")
    for candidate in pair:
        records = candidate.run.metrics.read()
        assert len([r for r in records if "loss" in r]) == 2
        assert f"{records[-1]['validation_loss']:.4f}" in text
        load_run(candidate.run.path, CPU)
    additive, delta = (c.trainer.config for c in pair)
    assert replace(additive, model=delta.model, out=delta.out) == delta
    assert [c.run.path.name for c in pair] == ["additive-s1337", "ddl-tc-s1337"]
    assert runs_at(tmp_path) == [c.run.path for c in pair]
    assert additive.model == short(tmp_path, "additive").model
    assert delta.model == short(tmp_path, "ddl-tc").model
