"""Training raises InputError for invalid input, directories and files; the messages are pinned."""

from __future__ import annotations

import json
import re
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from ddl.errors import DivergedError, InputError
from ddl.lab import data
from ddl.lab.config import PRESETS, OptimConfig, TrainConfig
from ddl.lab.config.stored import from_json, to_json
from ddl.lab.train import Trainer, train
from ddl.lab.train.runs import RunDirectory, load_run
from tests.support.train_cases import quiet, short

CPU = torch.device("cpu")


def test_existing_run_is_refused_then_replaced_alone(tmp_path: Path) -> None:
    config = short(tmp_path, "additive", steps=1)
    run = train(config, quiet()).run
    (run.path / "notes.txt").write_text("mine")
    expected = (
        f"`out` must be a directory without a run, got {run.path}, which has one:"
        " choose another or add --overwrite"
    )
    with pytest.raises(InputError, match=f"^{re.escape(expected)}$"):
        train(config, quiet())
    train(replace(config, overwrite=True), quiet())
    assert len(run.metrics.read()) == 2  # without the first run's lines
    assert (run.path / "notes.txt").read_text() == "mine"


def test_a_run_directory_made_by_hand_is_not_locked(tmp_path: Path) -> None:
    config = short(tmp_path, "additive", steps=1, overwrite=True)
    made = [RunDirectory.create(config, data.ByteTokenizer()) for _ in range(2)]
    run = train(config, quiet()).run
    assert run.path == made[0].path


def test_a_directory_of_something_else_is_refused(tmp_path: Path) -> None:
    config = short(tmp_path, "additive", steps=1)
    out = config.directory
    out.mkdir()
    (out / "notes.txt").write_text("mine")
    expected = (
        f"`out` must be a new or empty directory, got {out}, which has other files:"
        " choose another or add --overwrite, which leaves them alone"
    )
    with pytest.raises(InputError, match=f"^{re.escape(expected)}$"):
        train(config, quiet())
    assert [file.name for file in out.iterdir()] == ["notes.txt"]
    expected = f"`out` must be a directory, got {out / 'notes.txt'}: Not a directory"
    for overwrite in (False, True):
        with pytest.raises(InputError, match=f"^{re.escape(expected)}$"):
            train(replace(config, out=out / "notes.txt", overwrite=overwrite), quiet())
    train(replace(config, overwrite=True), quiet())
    assert (out / "notes.txt").read_text() == "mine"
    assert (out / "checkpoints").exists()
    empty = tmp_path / "empty"
    empty.mkdir()
    train(replace(config, out=empty), quiet())


def test_diverging_loss_is_a_sentence(tmp_path: Path) -> None:
    config = short(tmp_path, "additive", steps=40, log_every=1)
    config = replace(config, optim=OptimConfig(lr=1e30, warmup_steps=0, clip=0))
    with pytest.raises(DivergedError, match=r"^the (loss|gradient) is not finite at step \d+ \("):
        train(config, quiet())


def test_config_json_round_trip_and_damage(tmp_path: Path) -> None:
    for config in (*PRESETS.values(), short(tmp_path)):
        assert from_json(TrainConfig, to_json(config)) == config
    values = json.loads(to_json(short(tmp_path)))
    wrong = {"stepz": values | {"stepz": 1}}
    wrong |= {f"{part}.x": values | {part: values[part] | {"x": 1}} for part in ("model", "optim")}
    for field, read in wrong.items():
        hint = "if a newer ddl-rs wrote it, install that version"
        sentence = f"`config.json` must hold a TrainConfig, got the unknown field '{field}'; {hint}"
        with pytest.raises(InputError, match=f"^{re.escape(sentence)}$"):
            from_json(TrainConfig, json.dumps(read))
    for text in ("{", "[]"):
        with pytest.raises(InputError, match=r"^`config.json` must hold a TrainConfig, got "):
            from_json(TrainConfig, text)
    with pytest.raises(InputError, match=r"^`steps` must be an integer of at least 1, got -5$"):
        from_json(TrainConfig, json.dumps(values | {"steps": -5}))


def test_a_damaged_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"^`run` must be a run directory of `ddl train`, got "):
        load_run(tmp_path, CPU)
    run = train(short(tmp_path, "additive", steps=1), quiet()).run
    (weights,) = run.path.glob("checkpoints/*/model/*.safetensors")
    other = train(short(tmp_path, "ddl-cc", steps=1, out=tmp_path / "other"), quiet()).run
    for content in (b"", b"garbage", weights.read_bytes()[:-10]):
        weights.write_bytes(content)
        with pytest.raises(InputError, match="must be as it was saved, got a damaged model/"):
            load_run(run.path, CPU)
    shutil.rmtree(run.path / "checkpoints")
    shutil.copytree(other.path / "checkpoints", run.path / "checkpoints")
    with pytest.raises(
        InputError, match=r"must be a run whose checkpoints have its config\.json, "
    ):
        load_run(run.path, CPU)


def test_tokens_beyond_the_vocabulary_are_refused(tmp_path: Path) -> None:
    for name in ("train.bin", "val.bin"):
        np.full(100, 300, dtype=np.uint16).tofile(tmp_path / name)
    corpus = replace(data.load(tmp_path), tokenizer=data.ByteTokenizer())
    expected = f"`{tmp_path}` must hold tokens below `vocab_size` = 256, got 300"
    with pytest.raises(InputError, match=f"^{re.escape(expected)}$"):
        Trainer(short(tmp_path), corpus, CPU)


def test_samples_of_tokens_that_cannot_be_decoded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Refused before the first step, not at the first sample."""
    monkeypatch.setitem(sys.modules, "tiktoken", None)
    for name in ("train.bin", "val.bin"):
        np.full(100, 300, dtype=np.uint16).tofile(tmp_path / name)
    config = short(tmp_path, "additive", data=str(tmp_path), sample_every=6)
    with pytest.raises(InputError, match=r"^GPT-2 tokens need the package tiktoken to be read as "):
        train(config, quiet())
    assert not config.directory.exists()


@pytest.mark.parametrize("betas", [(0.9,), (), 0.9, (0.9, 1.0), (0.9, "x"), (0.9, 0.95, 0.1)])
def test_betas_are_two_numbers(betas: object) -> None:
    with pytest.raises(InputError, match=r"^`betas` must be two numbers in \[0, 1\), got"):
        OptimConfig(betas=betas)  # type: ignore[arg-type]
