"""`torchrun -m ddl train`: one process speaks, and other commands are refused."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import ddl
from ddl.lab.train.runs import RunDirectory
from tests.support.processes import Forked, command

TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"]
SHORT = ["tiny", "--steps", "4", "--eval-every", "2", "--log-every", "1", "--eval-batches", "1"]


@pytest.mark.exhaustive
def test_torchrun(tmp_path: Path) -> None:
    run = tmp_path / "run"
    arguments = ["-m", "ddl", "train", *SHORT, "--out", str(run), "--device", "cpu"]
    environment = os.environ | {
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(Path(ddl.__file__).parents[1]),
    }
    done = subprocess.run(
        [*TORCHRUN, *arguments, "--parallel", "fsdp2"],
        env=environment, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("2 processes (fsdp2)") == 1
    assert done.stdout.count("validation loss") == 2
    assert [r["step"] for r in RunDirectory(run).metrics.read() if "loss" in r] == [1, 2, 3, 4]
    assert RunDirectory(run).steps()[-1] == 4


@pytest.mark.parametrize("arguments", [("sweep", "s.toml"), ("demo",), ("sample", "run")])
def test_other_commands(tmp_path: Path, arguments: tuple[str, ...]) -> None:
    forked = Forked(2, tmp_path / "out", command(*arguments))
    assert forked.wait() == [1, 1]
    assert forked.said(0) == (
        f"ddl {arguments[0]}: only `ddl train` runs in several processes, got 2 of torchrun: start"
        " the command without it\n"
    )
    assert forked.said(1) == ""


@pytest.mark.parametrize(
    ("arguments", "status", "said"),
    [
        (("train", "--help"), 0, "--process-timeout"),
        (("train", "--stepps", "3"), 2, "--stepps"),
        (("train", "tiny", "--steps", "0"), 1, "`--steps` must be"),
        (("train", "tiny", "--parallel", "zero"), 2, "--parallel"),
        (("trainn",), 2, "the command must be one of"),
    ],
)
def test_one_process_speaks(
    tmp_path: Path, arguments: tuple[str, ...], status: int, said: str
) -> None:
    forked = Forked(2, tmp_path / "out", lambda _: stopped(arguments))
    assert forked.wait() == [status] * 2, forked.said()
    assert said in forked.said(0)
    assert forked.said(1) == ""


def stopped(arguments: tuple[str, ...]) -> int:
    """The exit status of the command, which tyro may end."""
    try:
        return command(*arguments)(0)
    except SystemExit as stop:
        return int(stop.code or 0)


def test_sequences_for_each_process(tmp_path: Path) -> None:
    arguments = ("train", *SHORT, "--batch-size", "3", "--out", str(tmp_path / "run"))
    forked = Forked(2, tmp_path / "out", command(*arguments))
    assert forked.wait() == [1, 1]
    assert forked.said(0) == (
        "ddl train: `--accumulation` must be such that 2 processes have equal parts of a step's"
        " batch_size × accumulation sequences, got 3 × 1\n"
    )
    assert forked.said(1) == ""


def test_processes_that_do_not_find_each_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    values = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}
    for name, value in values.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("MASTER_PORT", raising=False)
    assert command("train", *SHORT, "--out", str(tmp_path / "run"))(0) == 1
    assert "ddl train: the processes of torchrun must find each other" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
