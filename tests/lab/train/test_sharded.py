"""Checkpoints that several processes write and read, each its part."""

from __future__ import annotations

import os
import shutil
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from ddl.errors import InputError
from ddl.lab.config import TrainConfig
from ddl.lab.load import load
from ddl.lab.train import Trainer, train
from ddl.lab.train.resume import find_start
from ddl.lab.train.runs import RunDirectory
from tests.support.processes import command, together, training
from tests.support.train_cases import quiet, short

from .test_processes import check_losses, losses

STEPS, STOPPED = 12, 6


def config(out: Path, **changes: Any) -> TrainConfig:
    fields = {"steps": STEPS, "eval_every": 4, "log_every": 1, "batch_size": 4, "accumulation": 3}
    return short(out.parent, "ddl-tc", precision="float32", out=out, **fields | changes)


@pytest.fixture(scope="module", params=["fsdp2", "ddp"])
def whole(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> TrainConfig:
    """A run of three processes."""
    folder = tmp_path_factory.mktemp(request.param)
    ran = config(folder / "run", parallel=request.param)
    together(3, folder / "out", training(ran))
    return ran


@pytest.fixture(scope="module")
def part(whole: TrainConfig) -> TrainConfig:
    """The same run, stopped after half of its steps; no test may change it."""
    folder = whole.directory.parent
    ran = replace(whole, out=folder / "part", resume="auto")
    step = Trainer.step

    def stop(self: Trainer, *flags: Any) -> Any:
        if self.steps_done + 1 == STOPPED and self.processes.rank == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        return step(self, *flags)

    def act(rank: int) -> int:
        Trainer.step = stop  # type: ignore[method-assign]
        return training(ran)(rank) - 128 - signal.SIGTERM

    together(3, folder / "stopped", act)
    assert RunDirectory(ran.directory).steps()[-1] == STOPPED
    return ran


@pytest.fixture
def stopped(part: TrainConfig, tmp_path: Path) -> TrainConfig:
    out = tmp_path / "run"
    shutil.copytree(part.directory, out)
    return replace(part, out=out)


def tensors(run: TrainConfig) -> dict[str, torch.Tensor]:
    """The weights of a run, as one process loads them."""
    model, _ = load(run.directory, "cpu")
    return dict(model.named_parameters())


@pytest.mark.table(0)
def test_the_same_number_of_processes_goes_on_bit_for_bit(
    stopped: TrainConfig, whole: TrainConfig, tmp_path: Path
) -> None:
    together(3, tmp_path / "out", training(stopped))
    assert losses(stopped) == losses(whole)
    found, expected = tensors(stopped), tensors(whole)
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


@pytest.mark.table(0)
@pytest.mark.parametrize(("count", "how"), [(1, "ddp"), (2, "fsdp2"), (4, "fsdp2"), (2, "ddp")])
def test_another_number_of_processes_goes_on(
    stopped: TrainConfig, whole: TrainConfig, tmp_path: Path, count: int, how: str
) -> None:
    going_on = replace(stopped, parallel=how)
    if count == 1:
        assert train(going_on, quiet()).status == 0
    else:
        together(count, tmp_path / "out", training(going_on))
    check_losses(going_on, whole)
    for step in RunDirectory(going_on.directory).steps():
        assert not list(RunDirectory(going_on.directory).checkpoint_path(step).glob("*.tmp"))


def test_the_clock_of_the_first_process_decides(tmp_path: Path) -> None:
    """All save when its minutes are over; the next step is skipped, because a GPU tells late."""
    ran = config(tmp_path / "run", steps=8, eval_every=8, save_minutes=1e-6, keep_every=1)
    slow = replace(ran, save_minutes=60.0)
    together(2, tmp_path / "out", lambda rank: training(slow if rank else ran)(rank))
    assert RunDirectory(ran.directory).steps() == [2, 4, 6, 8]


def test_a_part_lies_in_each_file(whole: TrainConfig) -> None:
    folder = RunDirectory(whole.directory).checkpoint_path(STEPS) / "model"
    files = sorted(folder.glob("*.safetensors"))
    sizes = []
    for file in files:
        with safe_open(file, "pt") as opened:
            sizes.append(sum(opened.get_tensor(name).numel() for name in opened.keys()))  # noqa: SIM118
    expected = sum(p.numel() for p in load(whole.directory, "cpu")[0].parameters())
    assert sum(sizes) == expected
    assert len(files) == (3 if whole.parallel == "fsdp2" else 1)
    assert max(sizes) < expected * (0.5 if whole.parallel == "fsdp2" else 1.1)


def test_one_process_samples_and_exports(whole: TrainConfig, tmp_path: Path) -> None:
    run = str(whole.directory)
    for arguments in (
        ("sample", run, "--tokens", "4", "--device", "cpu"),
        ("export", run, "--hf", str(tmp_path / "hf")),
    ):
        assert command(*arguments)(0) == 0, arguments
    expected = dict(load(whole.directory, "cpu")[0].named_parameters())
    found = dict(load(tmp_path / "hf", "cpu")[0].named_parameters())
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


def test_a_missing_part_is_noticed(stopped: TrainConfig, tmp_path: Path) -> None:
    if stopped.parallel == "ddp":
        pytest.skip("of one file")
    folder = RunDirectory(stopped.directory).checkpoint_path(STOPPED)
    (folder / "training" / "shard-00002-model-00001-of-00001.safetensors").unlink()
    with pytest.raises(InputError, match="got a missing training/shard-00002"):
        train(stopped, quiet())
    start = find_start(stopped)
    assert start is not None
    assert start.path == folder
