"""How several processes end: by a signal, an error, or because one of them is gone."""

from __future__ import annotations

import os
import shutil
import signal
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from ddl.errors import InputError
from ddl.lab.config import OptimConfig, TrainConfig
from ddl.lab.train import Trainer
from ddl.lab.train.json_lines import JsonLines
from ddl.lab.train.runs import RunDirectory
from ddl.lab.train.saver import Saver
from tests.support.processes import Forked, command, together, training
from tests.support.train_cases import short

from .test_processes import losses

HOW = ("ddp", "fsdp2")
STEPS = 8


def config(folder: Path, how: str, **changes: Any) -> TrainConfig:
    fields = {"steps": STEPS, "eval_every": 4, "log_every": 1, "batch_size": 4, "accumulation": 1}
    return short(
        folder, "ddl-cc", precision="float32", parallel=how, resume="auto", **fields | changes
    )


def at_step(step: int, rank: int, act: Callable[[], None]) -> None:
    """Let a process do something before a step."""
    original = Trainer.step

    def patched(self: Trainer, *flags: Any) -> Any:
        if (self.steps_done + 1, self.processes.rank) == (step, rank):
            act()
        return original(self, *flags)

    Trainer.step = patched  # type: ignore[method-assign]


def doing(run: TrainConfig, step: int, rank: int, act: Callable[[], None]) -> Callable[[int], int]:
    def train_until(own: int) -> int:
        at_step(step, rank, act)
        return training(run)(own)

    return train_until


@pytest.fixture(scope="module", params=HOW)
def whole(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> TrainConfig:
    folder = tmp_path_factory.mktemp(request.param)
    ran = config(folder, request.param)
    together(2, folder / "out", training(ran))
    return ran


def check_goes_on(run: TrainConfig, whole: TrainConfig, folder: Path) -> None:
    """Nothing half is left, and the resumed run is the one that was never stopped."""
    run_directory = RunDirectory(run.directory)
    for step in run_directory.steps():
        assert (run_directory.checkpoint_path(step) / "manifest.json").exists()
    together(2, folder / "resumed", training(run))
    assert losses(run) == losses(whole)
    assert not list(run.directory.rglob(".*"))


@pytest.mark.table(0)
@pytest.mark.parametrize(
    ("rank", "number"),
    [(0, signal.SIGTERM), (1, signal.SIGINT), (0, signal.SIGHUP), (1, signal.SIGUSR1)],
)
def test_a_signal_to_one_process_stops_all(
    whole: TrainConfig, tmp_path: Path, rank: int, number: int
) -> None:
    run = replace(whole, out=tmp_path / "run")
    stop = doing(run, 3, rank, lambda: os.kill(os.getpid(), number))
    forked = Forked(2, tmp_path / "out", stop)
    assert forked.wait() == [128 + number] * 2, forked.said()
    assert RunDirectory(run.directory).steps() == [3]
    assert "Stopped after 3 of 8 steps" in forked.said(0)
    assert forked.said(1) == ""
    check_goes_on(run, whole, tmp_path)


@pytest.mark.table(0)
def test_a_signal_stops_an_evaluation(whole: TrainConfig, tmp_path: Path) -> None:
    run = replace(whole, out=tmp_path / "run")
    evaluate = Trainer.evaluate

    def signalled(self: Trainer, stopped: Callable[[], bool]) -> Any:
        if self.processes.rank == 1 and self.steps_done == 4:
            os.kill(os.getpid(), signal.SIGTERM)
        return evaluate(self, stopped)

    def act(rank: int) -> int:
        Trainer.evaluate = signalled  # type: ignore[method-assign]
        return training(run)(rank)

    forked = Forked(2, tmp_path / "out", act)
    assert forked.wait() == [143, 143], forked.said()
    assert RunDirectory(run.directory).steps() == [4]
    assert not RunDirectory(run.directory).validation_losses()
    check_goes_on(run, whole, tmp_path)


@pytest.mark.table(0)
@pytest.mark.parametrize(("rank", "step"), [(0, 6), (1, 1), (1, 6)])
def test_a_killed_process_ends_the_others(
    whole: TrainConfig, tmp_path: Path, rank: int, step: int
) -> None:
    run = replace(whole, out=tmp_path / "run")
    kill = doing(run, step, rank, lambda: os.kill(os.getpid(), signal.SIGKILL))
    forked = Forked(2, tmp_path / "out", lambda own: command_status(lambda: kill(own)))
    statuses = forked.wait()
    assert statuses[rank] == -signal.SIGKILL
    assert statuses[1 - rank] == 1
    assert f"process {1 - rank} of 2 ends, because another one has ended" in forked.said(1 - rank)
    assert set(RunDirectory(run.directory).steps()) <= {4}  # it may have been killed in the save
    check_goes_on(run, whole, tmp_path)


def command_status(act: Callable[[], int]) -> int:
    """The exit status of `ddl train` if it calls `act` in place of training."""
    commands = sys.modules["ddl.lab.cli.main"].COMMANDS
    commands["train"] = commands["train"]._replace(run=lambda _: act())
    return command("train")(0)


@pytest.mark.table(0)
def test_a_process_that_hangs_ends_the_others(whole: TrainConfig, tmp_path: Path) -> None:
    run = replace(whole, out=tmp_path / "run", process_timeout=0.05)
    hang = doing(run, 3, 1, lambda: os.kill(os.getpid(), signal.SIGSTOP))
    forked = Forked(2, tmp_path / "out", lambda own: command_status(lambda: hang(own)))
    assert forked.wait(of=[0]) == [1]
    forked.kill()
    assert "has not answered for 0.05 minutes" in forked.said(0)
    check_goes_on(replace(run, process_timeout=10.0), whole, tmp_path)


def test_one_sentence_for_an_error_of_all(tmp_path: Path) -> None:
    run = config(tmp_path, "ddp", data=str(tmp_path / "missing.txt"))
    forked = Forked(2, tmp_path / "out", lambda _: command_status(lambda: training(run)(0)))
    assert forked.wait() == [1, 1]
    assert "missing.txt" in forked.said(0)
    assert forked.said(0).count("ddl train: ") == 1
    assert forked.said(1) == ""


def test_the_first_process_says_what_another_lacks(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("The delta rule erases what it overwrites. " * 100)
    here = config(tmp_path, "ddp", data=str(text))
    there = replace(here, data=str(tmp_path / "missing.txt"))
    both = (here, there)
    forked = Forked(
        2, tmp_path / "out", lambda rank: command_status(lambda: training(both[rank])(rank))
    )
    assert forked.wait() == [1, 1]
    assert "missing.txt" in forked.said(0)
    assert forked.said(1) == ""
    assert not (tmp_path / "run").exists()


def test_an_existing_run_is_kept(whole: TrainConfig, tmp_path: Path) -> None:
    shutil.copytree(whole.directory, tmp_path / "run")
    run = replace(whole, out=tmp_path / "run", resume=None)
    forked = Forked(2, tmp_path / "out", lambda rank: command_status(lambda: training(run)(rank)))
    assert forked.wait() == [1, 1]
    assert "choose another or add --overwrite" in forked.said(0)
    assert losses(run) == losses(whole)


@pytest.mark.parametrize("how", HOW)
def test_divergence(tmp_path: Path, how: str) -> None:
    optim = OptimConfig(lr=1e30, warmup_steps=0, clip=0)
    run = replace(config(tmp_path, how), optim=optim)
    forked = Forked(2, tmp_path / "out", lambda rank: command_status(lambda: training(run)(rank)))
    assert forked.wait() == [1, 1], forked.said()
    assert "is not finite at step" in forked.said(0)
    assert forked.said(0).count("ddl train: ") == 1
    assert forked.said(1) == ""
    assert "diverged" in RunDirectory(run.directory).metrics.read()[-1]


@pytest.mark.parametrize("how", HOW)
def test_weights_that_are_not_finite_in_one_process(tmp_path: Path, how: str) -> None:
    """Only the process that holds them, or writes them, can see it."""
    run = config(tmp_path, how)
    save = Saver.save

    def spoiled(self: Saver, *arguments: Any) -> None:
        if self.trainer.steps_done == 4:
            for parameter in self.trainer.model.parameters():
                local = getattr(parameter, "to_local", lambda p=parameter: p)()
                if self.trainer.processes.rank == (1 if how == "fsdp2" else 0):
                    with torch.no_grad():
                        local.fill_(float("nan"))
        save(self, *arguments)

    def act(rank: int) -> int:
        Saver.save = spoiled  # type: ignore[method-assign]
        return command_status(lambda: training(run)(rank))

    forked = Forked(2, tmp_path / "out", act)
    assert forked.wait() == [1, 1], forked.said()
    assert "not finite" in forked.said(0)
    assert forked.said(1) == ""
    assert RunDirectory(run.directory).steps() == []


@pytest.mark.table(0)
@pytest.mark.parametrize("how", HOW)
def test_a_full_disk(tmp_path: Path, how: str) -> None:
    """The first process cannot write a record; both end, and the checkpoint before it stays."""
    run = config(tmp_path, how)
    append = JsonLines.append

    def full(self: JsonLines, record: dict[str, Any]) -> None:
        if record["step"] == 6:
            raise InputError("out", "be writable", "metrics.jsonl: No space left on device")
        append(self, record)

    def act(rank: int) -> int:
        JsonLines.append = full  # type: ignore[method-assign]
        return command_status(lambda: training(run)(rank))

    forked = Forked(2, tmp_path / "out", act)
    assert forked.wait() == [1, 1], forked.said()
    assert "No space left" in forked.said(0)
    assert forked.said(1) == ""
    assert RunDirectory(run.directory).steps() == [4]


def test_a_bug_in_one_process_shows_where(tmp_path: Path) -> None:
    run = config(tmp_path, "ddp")

    def fail() -> None:
        raise ZeroDivisionError("a bug")

    wrong = doing(run, 3, 1, fail)
    forked = Forked(2, tmp_path / "out", lambda rank: command_status(lambda: wrong(rank)))
    assert forked.wait() == [1, 70]
    assert "ZeroDivisionError: a bug" in forked.said(1)
    assert "another one has ended" in forked.said(0)
