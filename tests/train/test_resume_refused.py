"""`ddl train --resume` refuses, in a sentence, what is not the run that it was; no file changes."""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from ddl.cli import main
from ddl.config import OptimConfig, TrainConfig
from ddl.errors import InputError
from ddl.models import GPT
from ddl.train import train
from ddl.train.runs import RunDirectory
from tests.support.train_cases import quiet


def files(run: Path) -> dict[str, bytes]:
    return {str(f.relative_to(run)): f.read_bytes() for f in run.rglob("*") if f.is_file()}


def refused(config: TrainConfig, sentence: str) -> None:
    """Training is refused with this sentence, and no file of the run changes."""
    before = files(config.directory)
    with pytest.raises(InputError, match=f"^{re.escape(sentence)}"):
        train(config, quiet())
    assert files(config.directory) == before


def test_other_options_are_refused(stopped: TrainConfig) -> None:
    out = stopped.directory
    end = f"as in {out}, to go on with it, got"
    refused(replace(stopped, steps=7), f"`steps` must be 6, {end} 7")
    other = replace(stopped.model, num_layers=3)
    refused(replace(stopped, model=other), f"`model.num_layers` must be 2, {end} 3")
    optim = replace(stopped.optim, lr=1e-4)
    refused(replace(stopped, optim=optim), f"`optim.lr` must be 0.003, {end} 0.0001")
    train(replace(stopped, save_every=1, device="auto"), quiet())  # these are free


def test_overwrite_and_another_out_are_refused(stopped: TrainConfig, tmp_path: Path) -> None:
    refused(
        replace(stopped, overwrite=True), "`overwrite` must be left out with `resume`, got both"
    )
    out, other = stopped.directory, tmp_path / "other"
    sentence = f"`out` must be left out with `resume`, got {other} beside {out}"
    refused(replace(stopped, resume=str(out), out=other), sentence)


def test_a_run_with_weights_only_is_refused(stopped: TrainConfig) -> None:
    """It could only begin again, over the weights."""
    shutil.rmtree(stopped.directory / "checkpoints")
    RunDirectory(stopped.directory).save(GPT(stopped.model))
    out = stopped.directory
    refused(stopped, f"`resume` must be a run with checkpoints, got {out}, with weights only")


def test_other_data_is_refused(stopped: TrainConfig, tmp_path: Path) -> None:
    text = Path(stopped.data or "")
    content = text.read_text()
    expected = f"`data` must be what {stopped.directory} was trained on, got `{text}` with another"
    text.write_text(content.replace("delta", "gamma", 1))
    refused(stopped, f"{expected} content")
    text.write_text(content + " ")
    refused(stopped, f"{expected} content")
    text.write_text(content)
    tokenizer = stopped.directory / "tokenizer.json"
    tokenizer.write_text('{"kind": "characters", "table": ["a"]}')
    refused(stopped, f"{expected} vocabulary")
    tokenizer.write_text('{"kind": "bytes", "table": null}')
    moved = tmp_path / "moved.txt"
    text.rename(moved)
    train(replace(stopped, data=str(moved)), quiet())  # the same text elsewhere


def damage(kind: str, file: Path) -> None:
    content = file.read_bytes()
    if kind == "missing":
        file.unlink()
    elif kind == "truncated":
        file.write_bytes(content[:-5])
    elif kind == "flipped":
        middle = len(content) // 2
        file.write_bytes(content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :])
    else:
        file.write_bytes(b"garbage")


@pytest.mark.parametrize("kind", ["missing", "truncated", "flipped", "garbage"])
@pytest.mark.parametrize("part", ["model", "training"])
def test_a_damaged_checkpoint_is_refused(stopped: TrainConfig, kind: str, part: str) -> None:
    path = RunDirectory(stopped.directory).checkpoint_path(3)
    (file,) = (path / part).glob("*.safetensors")
    damage(kind, file)
    got = "a missing" if kind == "missing" else "a damaged"
    refused(
        stopped,
        f"`{path}` must be as it was saved, got {got} {part}/{file.name}: delete this checkpoint"
        " to go on from the one before it",
    )
    shutil.rmtree(path)
    train(stopped, quiet())  # from the beginning: there is no other


@pytest.mark.parametrize("kind", ["missing", "truncated", "garbage"])
def test_a_damaged_manifest_is_refused(stopped: TrainConfig, kind: str) -> None:
    file = RunDirectory(stopped.directory).checkpoint_path(3) / "manifest.json"
    damage(kind, file)
    refused(stopped, f"`{file}` must be the manifest of a checkpoint, got: ")


@pytest.mark.parametrize(
    ("field", "value", "sentence"),
    [
        ("format", 2, "must have format 1, got format 2, which this version does not know; if a"),
        ("step", -1, "must be the manifest of a checkpoint, got: `step` is -1"),
        ("records", True, "must be the manifest of a checkpoint, got: `records` is True"),
        ("files", [], "must be the manifest of a checkpoint, got: `files` is []"),
        ("validation_loss", "low", "must be the manifest of a checkpoint, got: `validation_loss`"),
        ("more", 1, "must be the manifest of a checkpoint, got: "),
    ],
)
def test_a_manifest_with_other_fields_is_refused(
    stopped: TrainConfig, field: str, value: object, sentence: str
) -> None:
    file = RunDirectory(stopped.directory).checkpoint_path(3) / "manifest.json"
    values = json.loads(file.read_text())
    file.write_text(json.dumps(values | {field: value}))
    refused(stopped, f"`{file}` {sentence}")


def test_a_checkpoint_of_another_run_is_refused(stopped: TrainConfig, tmp_path: Path) -> None:
    other = replace(stopped, out=tmp_path / "other", optim=OptimConfig(lr=1e-5), resume=None)
    train(other, quiet())
    theirs = RunDirectory(other.directory).checkpoint_path(6)
    path = RunDirectory(stopped.directory).checkpoint_path(6)
    shutil.copytree(theirs, path)
    refused(
        stopped,
        "`resume` must be a run whose checkpoints have its config.json, got"
        f" {path}, which has another",
    )
    foreign = RunDirectory(stopped.directory).checkpoint_path(3) / "model" / "more.safetensors"
    shutil.rmtree(path)
    shutil.copy(next((theirs / "model").glob("*.safetensors")), foreign)
    expected = "must be as it was saved, got a foreign model/more.safetensors"
    refused(stopped, f"`{foreign.parents[1]}` {expected}")


def test_a_directory_that_another_process_trains_into_is_refused(stopped: TrainConfig) -> None:
    descriptor = os.open(stopped.directory, os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    sentence = f"`out` must be a directory of this process alone, got {stopped.directory}, into"
    refused(stopped, sentence)
    refused(replace(stopped, resume=None, overwrite=True), sentence)
    os.close(descriptor)
    train(stopped, quiet())


def test_the_command_takes_the_options_of_the_run(
    stopped: TrainConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    out = stopped.directory
    assert main(["train", "tiny", "--resume", str(out)]) == 1
    expected = "`preset` must be left out with --resume, which has the run's options, got tiny"
    assert capsys.readouterr().err == f"ddl train: {expected}\n"
    assert main(["train", "--resume", str(out), "--steps", "9"]) == 1
    expected = f"`--steps` must be 6, as in {out}, to go on with it, got 9"
    assert capsys.readouterr().err == f"ddl train: {expected}\n"
    assert main(["train", f"--resume={out}"]) == 0
    assert "Going on after step 3" in capsys.readouterr().out
    assert RunDirectory(out).steps()[-1] == 6
    nowhere = out.with_name("nowhere")
    assert main(["train", "--resume", str(nowhere)]) == 1
    expected = "`run` must be a run directory of `ddl train`, got "
    assert capsys.readouterr().err.startswith(f"ddl train: {expected}{nowhere}")
