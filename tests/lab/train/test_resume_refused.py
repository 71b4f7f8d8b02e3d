"""`ddl train --resume` says in a sentence why it cannot go on, and changes nothing."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import resource
import shutil
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from ddl.errors import InputError
from ddl.files import checksum
from ddl.lab.cli import main
from ddl.lab.config import OptimConfig, TrainConfig
from ddl.lab.load import load
from ddl.lab.train import Trainer, checkpoint, train
from ddl.lab.train.runs import RunDirectory
from ddl.models import GPT
from tests.lab.train.crash import assert_same, curve, tensors
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
    moved = tmp_path / "moved.txt"
    text.rename(moved)
    train(replace(stopped, data=str(moved)), quiet())  # the same text elsewhere


def test_another_tokenizer_is_refused(stopped: TrainConfig) -> None:
    """The one of a byte model, of which a character table would change each text in silence."""
    out = stopped.directory
    file, path = out / "tokenizer.json", RunDirectory(out).checkpoint_path(3)
    table = json.dumps([chr(token ^ 1) for token in range(256)])
    file.write_text(f'{{"kind": "characters", "table": {table}}}')
    got = "of the run's checkpoint of step 3, got another: it was damaged or changed"
    sentence = f"`{file}` must be the tokenizer {got}"
    refused(stopped, sentence)
    with pytest.raises(InputError, match=f"^{re.escape(sentence)}$"):
        load(out, "cpu")
    values = json.loads((path / "manifest.json").read_text())
    (path / "manifest.json").write_text(json.dumps(values | {"tokenizer": None}))
    assert load(out, "cpu").tokenizer.kind == "characters"  # of an earlier version
    refused(stopped, f"`data` must be what {out} was trained on, got `{stopped.data}` with another")
    file.write_text('{"table": null, "kind": "bytes"}')  # the same
    (path / "manifest.json").write_text(json.dumps(values))
    train(stopped, quiet())


def test_another_model_is_refused(stopped: TrainConfig) -> None:
    """Its weights have the same shapes, so that they would compute other numbers in silence."""
    out = stopped.directory
    file, path = out / "config.json", RunDirectory(out).checkpoint_path(3)
    values = json.loads(file.read_text())
    values["model"]["rope_base"] *= 2
    file.write_text(json.dumps(values))
    sentence = f"`run` must be a run whose checkpoints have its config.json, got {path}, which has"
    with pytest.raises(InputError, match=f"^{re.escape(sentence)} another model$"):
        load(out, "cpu", argument="run")


def test_a_manifest_with_another_configuration(stopped: TrainConfig) -> None:
    file = RunDirectory(stopped.directory).checkpoint_path(3) / "manifest.json"
    values = json.loads(file.read_text())
    values["config"]["model"]["more"] = 1
    file.write_text(json.dumps(values))
    sentence = f"`{file}` must hold a TrainConfig, got the unknown field 'model.more'; if a newer"
    refused(stopped, sentence)
    with pytest.raises(InputError, match=f"^{re.escape(sentence)}"):
        load(stopped.directory, "cpu")


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


@pytest.mark.table(1)
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
    refused(stopped, f"`{file}` must be the manifest of a checkpoint, got ")


@pytest.mark.parametrize(
    ("field", "value", "sentence"),
    [
        ("format", 2, "must have format 1, got format 2, which this version does not know; if a"),
        ("step", -1, "must be the manifest of a checkpoint, got `step` is -1"),
        ("records", True, "must be the manifest of a checkpoint, got `records` is True"),
        ("tokenizer", 1, "must be the manifest of a checkpoint, got `tokenizer` is 1"),
        ("files", [], "must be the manifest of a checkpoint, got `files` is []"),
        ("validation_loss", "low", "must be the manifest of a checkpoint, got `validation_loss`"),
        ("validation_loss", float("nan"), "must be the manifest of a checkpoint, got `validation"),
        (
            "more",
            1,
            "must be the manifest of a checkpoint, got the unknown field 'more'; if a newer",
        ),
    ],
)
def test_a_manifest_with_other_fields_is_refused(
    stopped: TrainConfig, field: str, value: object, sentence: str
) -> None:
    file = RunDirectory(stopped.directory).checkpoint_path(3) / "manifest.json"
    values = json.loads(file.read_text())
    file.write_text(json.dumps(values | {field: value}))
    refused(stopped, f"`{file}` {sentence}")


@pytest.mark.parametrize(("name", "step"), [(5, 3), (3, 5), (3, 10**30), (9, 9)])
def test_a_checkpoint_of_another_step(stopped: TrainConfig, name: int, step: int) -> None:
    """Behind the last step, training would not end."""
    run = RunDirectory(stopped.directory)
    path = run.checkpoint_path(3).rename(run.checkpoint_path(name))
    values = json.loads((path / "manifest.json").read_text())
    (path / "manifest.json").write_text(json.dumps(values | {"step": step}))
    expected = "`resume` must be a run whose checkpoints are named by their steps, up to 6, got"
    refused(stopped, f"{expected} {path} of step {step}")


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


@pytest.mark.parametrize("kind", ["directory", "link"])
def test_no_file_among_the_tensors(stopped: TrainConfig, kind: str) -> None:
    path = RunDirectory(stopped.directory).checkpoint_path(3)
    more = path / "training" / "more"
    if kind == "directory":
        more.mkdir()
    else:
        more.symlink_to("nowhere")
    refused(stopped, f"`{path}` must be as it was saved, got a foreign training/more: delete")


def test_tensors_that_the_writer_does_not_describe(stopped: TrainConfig) -> None:
    """With a checksum that fits them."""
    path = RunDirectory(stopped.directory).checkpoint_path(3)
    (file,) = (path / "training").glob("*.safetensors")
    with safe_open(file, "pt") as opened:
        described = opened.metadata()
    save_file(load_file(file) | {"more": torch.zeros(1)}, file, described)
    manifest = checkpoint.read_manifest(path)
    manifest.files[f"training/{file.name}"] = [file.stat().st_size, checksum(file)]
    (path / "manifest.json").write_text(json.dumps(asdict(manifest)))
    refused(stopped, f"`{path / 'training'}` must hold the tensors of this run, got 'more'")


def test_checkpoints_that_are_no_directory(stopped: TrainConfig) -> None:
    folder = stopped.directory / "checkpoints"
    shutil.rmtree(folder)
    folder.write_text("")
    sentence = f"`run` must have a readable directory checkpoints, got {folder}: Not a directory"
    refused(stopped, sentence)


@pytest.mark.parametrize(
    ("content", "got"),
    [
        (b"\0\n", "line 1: Expecting value"),
        (b'{"step": 2}\n' + b"[" * 100_000 + b"\n", "line 2: "),
        (b"[]\n", "line 1 without"),
        (b'{"sample": ""}\n', "line 1 without"),
        (b"\xff\n", "line 1: Expecting value"),
    ],
)
def test_damaged_metrics(stopped: TrainConfig, content: bytes, got: str) -> None:
    file = stopped.directory / "metrics.jsonl"
    whole = file.read_bytes()
    manifest = RunDirectory(stopped.directory).checkpoint_path(3) / "manifest.json"
    manifest.write_text(json.dumps(json.loads(manifest.read_text()) | {"records": 2}))
    file.write_bytes(content)
    refused(stopped, f"`{file}` must be lines of JSON with a step each, got {got}")
    file.write_bytes(whole + whole + content)  # behind the checkpoint
    train(stopped, quiet())


def test_a_damaged_configuration(stopped: TrainConfig) -> None:
    """It is not taken for a new run, which could only replace this one."""
    file = stopped.directory / "config.json"
    file.write_text("{")
    expected = f"`run` must be a run directory of `ddl train`, got {stopped.directory}: its config"
    refused(stopped, f"{expected}.json cannot be read: ")
    file.unlink()
    got = f"{stopped.directory}: a run that has lost its config.json"
    refused(stopped, f"`run` must be a run directory of `ddl train`, got {got}")


def test_a_directory_that_another_process_trains_into_is_refused(stopped: TrainConfig) -> None:
    descriptor = os.open(stopped.directory, os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    sentence = f"`out` must be a directory of this process alone, got {stopped.directory}, into"
    refused(stopped, sentence)
    refused(replace(stopped, resume=None, overwrite=True), sentence)
    os.close(descriptor)
    train(stopped, quiet())


def while_it_starts(monkeypatch: pytest.MonkeyPatch, act: Callable[[], None]) -> None:
    """Do something while the next trainer is made, as another process may."""
    original = Trainer.__init__

    def make(*args: Any) -> None:
        monkeypatch.setattr(Trainer, "__init__", original)
        act()
        original(*args)

    monkeypatch.setattr(Trainer, "__init__", make)


@pytest.mark.parametrize("checkpoints", [False, True])
def test_of_several_that_go_on_one_gets_the_lock(
    stopped: TrainConfig, monkeypatch: pytest.MonkeyPatch, checkpoints: bool
) -> None:
    """It has it before it reads anything, so that the others are refused from the beginning."""
    if not checkpoints:
        shutil.rmtree(stopped.directory / "checkpoints")
    out = stopped.directory
    sentence = f"`out` must be a directory of this process alone, got {out}, into which another one"
    while_it_starts(monkeypatch, lambda: refused(stopped, sentence))
    train(stopped, quiet())
    assert RunDirectory(out).steps()[-1] == 6
    train(stopped, quiet())  # it is not locked


@pytest.mark.parametrize("when", ["it starts", "it makes the directory"])
def test_of_several_that_start_one_begins_the_run(
    stopped: TrainConfig, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, when: str
) -> None:
    """Another one began it and ended, after this one saw none."""
    new = replace(stopped, out=tmp_path / "new")
    if when == "it starts":
        while_it_starts(monkeypatch, lambda: train(new, quiet()) and None)
    else:
        lock = RunDirectory.lock

        def late(self: RunDirectory) -> None:
            monkeypatch.setattr(RunDirectory, "lock", lock)
            train(new, quiet())
            lock(self)

        monkeypatch.setattr(RunDirectory, "lock", late)
    sentence = (
        f"`resume` must be a run that no other process goes on with, got {new.directory}, in which"
        " another one has begun a run meanwhile: repeat the command, which goes on with it"
    )
    with pytest.raises(InputError, match=f"^{re.escape(sentence)}$"):
        train(new, quiet())
    assert RunDirectory(new.directory).steps() == [6]
    train(new, quiet())  # it is not locked


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS, errno.EIO])
def test_a_disk_that_fails(
    stopped: TrainConfig, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """The save fails in the background; the run stops, and the last checkpoint stays."""
    before = tensors(stopped)

    def fail(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", fail)
        sentence = rf"^`out` must be writable, got .*: {os.strerror(number)}$"
        with pytest.raises(InputError, match=sentence):
            train(replace(stopped, save_every=1), quiet())
    assert_same(tensors(stopped), before)
    assert not list(stopped.directory.rglob(".*"))
    whole = replace(stopped, out=stopped.directory.parent / "whole", resume=None)
    train(whole, quiet())
    train(stopped, quiet())
    assert curve(stopped) == curve(whole)


def test_a_disk_that_is_full_in_the_middle_of_a_tensor(stopped: TrainConfig) -> None:
    """torch wraps the error of the write; the sentence is the same as for any other file."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = tensors(stopped)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, hard))
    try:
        with pytest.raises(InputError, match=r"^`out` must be writable, got .*: File too large$"):
            train(stopped, quiet())
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert_same(tensors(stopped), before)
    assert not list(stopped.directory.rglob(".*"))


def test_the_command_takes_the_options_of_the_run(
    stopped: TrainConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    out = stopped.directory
    assert main(["train", "tiny", "--resume", str(out)]) == 1
    expected = "`preset` must be left out with --resume, which has the run's options, got tiny"
    assert capsys.readouterr().err == f"ddl train: {expected}\n"
    assert main(["train", "--resume", str(out), "--steps", "9"]) == 1
    expected = f"`--steps` must be 6, as in {out}, to go on with it, got 9"
    expected += f"; for another value start a new run, from these weights with `--init-from` {out}"
    assert capsys.readouterr().err == f"ddl train: {expected}\n"
    assert main(["train", "--resume", str(out), "--model.num-layers", "9"]) == 1
    expected = f"`--model.num-layers` must be 2, as in {out}, to go on with it, got 9"
    expected += "; for another value start a new run"  # the weights would not fit
    assert capsys.readouterr().err == f"ddl train: {expected}\n"
    assert main(["train", f"--resume={out}"]) == 0
    assert "Going on after step 3" in capsys.readouterr().out
    assert RunDirectory(out).steps()[-1] == 6
    assert main(["train", f"--resume={out}"]) == 0
    assert f"{out} has had all of its 6 steps\n" in capsys.readouterr().out
    nowhere = out.with_name("nowhere")
    assert main(["train", "--resume", str(nowhere)]) == 1
    expected = "`--resume` must be a run directory of `ddl train`, got "
    assert capsys.readouterr().err.startswith(f"ddl train: {expected}{nowhere}")
