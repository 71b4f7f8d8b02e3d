"""`ddl train --record-every`: what the rewrites do over training."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import ddl
from ddl.errors import InputError
from ddl.lab import data
from ddl.lab.config import TrainConfig
from ddl.lab.train import Trainer, train
from ddl.lab.train.runs import RunDirectory, load_run
from tests.lab.train.crash import curve
from tests.support.train_cases import quiet, short, stop_at


def recordings(config: TrainConfig) -> list[dict[str, Any]]:
    return RunDirectory(config.directory).recordings.read()


def test_the_recording_of_a_step_is_that_of_its_weights(tmp_path: Path) -> None:
    config = short(tmp_path, "ddl-cc", record_every=4)
    train(config, quiet())
    first, last = recordings(config)
    assert (first.pop("step"), last.pop("step")) == (4, 6)  # the last step is recorded, too
    model, _ = load_run(config.directory, torch.device("cpu"))
    (windows,) = data.evaluation_batches(
        data.load("topics").validation, config.batch_size, config.model.block_size, 1
    )
    with ddl.record(model) as recording, torch.no_grad():
        model(windows.tokens)
    assert last == recording.summary()
    assert first != last
    assert last["tokens"] == config.batch_size * config.model.block_size


def test_training_goes_on_as_without_recordings(tmp_path: Path) -> None:
    config = short(tmp_path, "ddl-tc", record_every=1)
    without = replace(config, out=tmp_path / "without", record_every=None)
    for each in (config, without):
        train(each, quiet())
    assert curve(config) == curve(without)
    assert not (without.directory / "recordings.jsonl").exists()


def test_a_resumed_run_has_the_recordings_of_the_uninterrupted_one(tmp_path: Path) -> None:
    """Recordings behind the last checkpoint are dropped, and made again."""
    config = short(tmp_path, "ddl-cc", record_every=2, steps=8, save_every=3, eval_every=100)
    whole = replace(config, out=tmp_path / "whole")
    train(whole, quiet())
    with pytest.MonkeyPatch.context() as patch:
        stop_at(3, patch)
        train(config, quiet())
    file = config.directory / "recordings.jsonl"
    lines = file.read_text()
    file.write_text(lines + lines.replace('"step": 2', '"step": 4') + '{"step": 6, "to')
    for _ in range(2):  # the second time there is nothing left to do
        train(replace(config, resume="auto"), quiet())
        assert recordings(config) == recordings(whole)
    assert [recording["step"] for recording in recordings(whole)] == [2, 4, 6, 8]


def test_an_evaluation_and_a_recording_measure_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured: list[int] = []
    original = Trainer.record

    def record(self: Trainer) -> Any:
        measured.append(self.steps_done)
        return original(self)

    monkeypatch.setattr(Trainer, "record", record)
    config = short(tmp_path, "ddl-cc", record_every=2, eval_every=3)
    run = train(config, quiet()).run
    assert measured == [2, 3, 4, 6]
    evaluated = {r["step"]: r["mean_beta"] for r in run.metrics.read() if "mean_beta" in r}
    last = recordings(config)[-1]
    means = [sublayer["beta"]["mean"] for sublayer in last["sublayers"]]
    assert evaluated[6] == pytest.approx(sum(means) / len(means))


def test_a_model_without_rewrites_records_what_its_sublayers_add(tmp_path: Path) -> None:
    config = short(tmp_path, "additive", record_every=2, eval_every=3)
    train(config, quiet())
    found = recordings(config)
    assert [recording["step"] for recording in found] == [2, 4, 6]
    assert [sublayer["name"] for sublayer in found[0]["sublayers"]] == [
        f"trunk.sublayers.{i}" for i in range(2 * config.model.num_layers)
    ]
    assert all(sublayer["write_norm"]["mean"] > 0 for sublayer in found[0]["sublayers"])
    assert "beta" not in found[0]["sublayers"][0]
    records = RunDirectory(config.directory).metrics.read()
    assert not any("mean_beta" in record for record in records)


def test_a_run_that_replaces_another_drops_its_recordings(tmp_path: Path) -> None:
    config = short(tmp_path, "ddl", record_every=2, steps=2)
    train(config, quiet())
    train(replace(config, record_every=None, overwrite=True), quiet())
    assert recordings(config) == []


def test_damaged_recordings_are_refused_at_resume(tmp_path: Path) -> None:
    config = short(tmp_path, "ddl", record_every=2, steps=4)
    with pytest.MonkeyPatch.context() as patch:
        stop_at(2, patch)
        train(config, quiet())
    file = config.directory / "recordings.jsonl"
    file.write_text('{"step": -1}\n')
    sentence = f"`{file}` must be lines of JSON with a step each, got line 1 without"
    with pytest.raises(InputError, match=f"^{re.escape(sentence)}"):
        train(replace(config, resume="auto"), quiet())
    file.unlink()
    train(replace(config, resume="auto"), quiet())
    assert [recording["step"] for recording in recordings(config)] == [2, 4]
