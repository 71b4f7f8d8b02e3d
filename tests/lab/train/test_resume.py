"""`ddl train --resume`: the resumed run is the uninterrupted one, bit for bit."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from ddl.errors import InputError
from ddl.lab.config import BASELINES, TrainConfig
from ddl.lab.train import Step, Trainer, checkpoint, train
from ddl.lab.train.runs import RunDirectory, load_run
from ddl.lab.train.saver import Saver
from tests.lab.train.crash import assert_same, curve, tensors
from tests.support.train_cases import quiet, recorder, short, stop_at

CPU = torch.device("cpu")
OPTIONS = {"ddl-cc": {"rewrites": 2}, "ddl-tc": {"erase": "none"}}  # of the model


def train_in_parts(config: TrainConfig, stops: list[int]) -> None:
    """Train, stopped by a signal in each of these steps and resumed after it."""
    for step in stops:
        with pytest.MonkeyPatch.context() as patch:
            stop_at(step, patch)
            assert train(config, quiet()).status == 128 + signal.SIGTERM
        assert RunDirectory(config.directory).steps()[-1] == step
        config = replace(config, resume="auto")
    assert train(config, quiet()).status == 0


@pytest.mark.parametrize(
    ("residual", "changes"),
    [
        pytest.param("additive", {}, marks=pytest.mark.exhaustive),
        ("ddl-cc", {"accumulation": 2, "sample_every": 3, "record_every": 5}),
        ("ddl-tc", {"precision": "bfloat16", "save_every": 4, "keep_every": 4}),
        *(
            pytest.param(residual, {"precision": "bfloat16", "record_every": 5}, marks=marks)
            for residual in BASELINES[1:]
            for marks in ([] if residual == "mhc" else [pytest.mark.exhaustive],)
        ),
    ],
)
def test_a_resumed_run_is_the_uninterrupted_one(
    tmp_path: Path, residual: str, changes: dict[str, Any]
) -> None:
    """Stopped in the middle of a record, before an evaluation, and twice in a row."""
    config = short(tmp_path, residual, steps=13, log_every=4, eval_every=5, **changes)
    options: dict[str, Any] = OPTIONS.get(residual, {})
    config = replace(config, model=replace(config.model, **options))
    whole = replace(config, out=tmp_path / "whole")
    train(whole, quiet())
    train_in_parts(config, [2, 3, 5, 12])
    assert curve(config) == curve(whole)
    assert_same(tensors(config), tensors(whole))
    losses = {r["step"]: r["validation_loss"] for r in curve(config) if "validation_loss" in r}
    assert set(losses) == {5, 10, 13}
    run = RunDirectory(config.directory)
    assert run.best_step() == min(losses, key=losses.__getitem__)
    assert run.steps() == ([4, 8, 12, 13] if "keep_every" in changes else [13])


@pytest.mark.exhaustive
def test_a_compiled_model_resumes_bit_for_bit(tmp_path: Path) -> None:
    config = short(tmp_path, "ddl-cc", steps=5, log_every=1, eval_every=5, compile=True)
    whole = replace(config, out=tmp_path / "whole")
    train(whole, quiet())
    train_in_parts(config, [3])
    assert curve(config) == curve(whole)
    assert_same(tensors(config), tensors(whole))


def test_a_loaded_model_does_not_change_with_its_files(tmp_path: Path) -> None:
    """A checkpoint is copied, not mapped: a file that is replaced later changes nothing."""
    config = short(tmp_path, "additive", steps=2)
    run = train(config, quiet()).run
    model, _ = load_run(run.path, CPU)
    before = [parameter.clone() for parameter in model.parameters()]
    for file in run.path.rglob("*.safetensors"):
        with file.open("r+b") as opened:
            opened.write(b"\0" * file.stat().st_size)
    assert all(torch.equal(*pair) for pair in zip(before, model.parameters(), strict=True))


def test_last_best_and_multiples_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    losses = iter([3.0, 1.0, 2.0, 1.5, 4.0])
    monkeypatch.setattr(Trainer, "evaluate", lambda self, stopped: next(losses))
    config = short(tmp_path, "additive", steps=10, eval_every=2, save_every=3, keep_every=6)
    run = train(config, quiet()).run
    assert run.steps() == [4, 6, 10]  # best, kept, last
    assert run.best_step() == 4
    for which, step in (("best", 4), ("last", 10), ("6", 6)):
        assert run.find_checkpoint(which) == run.checkpoint_path(step)
    sentence = "`checkpoint` must be last, best or a step that was saved, one of 4, 6, 10, got '5'"
    with pytest.raises(InputError, match=f"^{re.escape(sentence)}$"):
        run.find_checkpoint("5")


def test_save_minutes_saves_between_evaluations(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved = []
    original = Saver.save

    def save(self: Saver, evaluated: float | None, *more: Any) -> None:
        saved.append(self.trainer.steps_done)
        original(self, evaluated, *more)

    monkeypatch.setattr(Saver, "save", save)
    config = short(tmp_path, "additive", steps=4, eval_every=4, save_minutes=1e-9)
    train(config, quiet())
    assert saved == [1, 2, 3, 4]
    saved.clear()
    train(replace(config, save_minutes=60.0, overwrite=True), quiet())
    assert saved == [4]


def test_resuming_a_finished_run_changes_no_record(tmp_path: Path) -> None:
    config = short(tmp_path, "additive", steps=2, resume="auto")
    run = train(config, quiet()).run
    before = run.metrics.read()
    assert train(config, console := recorder()).status == 0
    assert "Done; " in console.export_text()
    assert run.metrics.read() == before


def test_nothing_in_a_run_is_a_pickle(tmp_path: Path) -> None:
    run = train(short(tmp_path, "ddl-cc", steps=2), quiet()).run
    written = [path for path in run.path.rglob("*") if path.is_file()]
    assert {path.suffix for path in written} == {".json", ".jsonl", ".safetensors", ".png"}
    assert len(written) == 4 + 5


def test_half_a_line_of_metrics_is_dropped(tmp_path: Path) -> None:
    config = short(tmp_path, "additive", steps=4, log_every=1, resume="auto")
    run = train(config, quiet()).run
    before = run.metrics.read()
    with (run.path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 5, "lo')
    assert run.metrics.read() == before
    train(config, quiet())
    assert (run.path / "metrics.jsonl").read_text().splitlines() == [json.dumps(r) for r in before]


def test_a_run_goes_on_without_its_records(stopped: TrainConfig) -> None:
    run = RunDirectory(stopped.directory)
    (run.path / "metrics.jsonl").unlink()
    train(stopped, quiet())
    assert [record["step"] for record in run.metrics.read()] == [4, 6, 6]


def test_a_failed_save_ends_the_run_after_the_next_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It does not wait for the next save, which may be hours away."""
    steps, save, step = [0], Saver.save, Trainer.step

    def fail(*_: object, **__: object) -> None:
        raise InputError.sentence("the disk is full")

    def save_and_settle(self: Saver, evaluated: float | None, *more: Any) -> None:
        save(self, evaluated, *more)
        self.settle()

    def counted(self: Trainer, *flags: Any) -> Step:
        steps[0] += 1
        return step(self, *flags)

    monkeypatch.setattr(checkpoint, "write", fail)
    monkeypatch.setattr(Saver, "save", save_and_settle)
    monkeypatch.setattr(Trainer, "step", counted)
    with pytest.raises(InputError, match=r"^the disk is full$"):
        train(short(tmp_path, "additive", steps=9, eval_every=9, save_every=2), quiet())
    assert steps == [3]


def start(out: Path, *options: str) -> subprocess.Popen[str]:
    """Start a long run in another process, and wait for its first record."""
    command = [sys.executable, "-m", "ddl", "train", "tiny", "--steps", "100000", "--out", str(out)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    process = subprocess.Popen(
        [*command, "--device", "cpu", "--log-every", "1", *options],
        env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    while process.poll() is None and not (out / "metrics.jsonl").exists():
        time.sleep(0.01)
    return process


def test_a_signal_ends_the_command_with_its_status(tmp_path: Path) -> None:
    out = tmp_path / "run"
    process = start(out)
    process.send_signal(signal.SIGTERM)
    output, errors = process.communicate(timeout=120)
    assert process.returncode == 128 + signal.SIGTERM, errors
    assert "Stopping after this step" in errors
    assert f"go on with `ddl train --resume {out}`" in output
    assert RunDirectory(out).steps()


@pytest.mark.exhaustive
def test_a_signal_that_nobody_reads_of(tmp_path: Path) -> None:
    """Ctrl-C also ends the `tee` of `2>&1 | tee`; the run still saves its checkpoint."""
    process = start(tmp_path / "run")
    assert process.stderr is not None
    process.stderr.close()
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=120)
    assert process.returncode == 128 + signal.SIGINT
    assert RunDirectory(tmp_path / "run").steps()


def test_output_that_nobody_reads(tmp_path: Path) -> None:
    """As after `| head`: the evaluation that cannot be printed is saved."""
    process = start(tmp_path / "run", "--eval-every", "100", "--eval-batches", "1")
    assert process.stdout is not None
    process.stdout.close()
    process.communicate(timeout=120)
    assert process.returncode == 128 + signal.SIGPIPE
    run = RunDirectory(tmp_path / "run")
    assert run.steps() == [100]
    assert run.validation_losses().keys() == {100}
