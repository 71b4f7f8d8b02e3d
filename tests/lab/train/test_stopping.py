"""The signals that end training after a step and a checkpoint, and the one that nohup ignores."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import ddl
from ddl.lab.train import train
from ddl.lab.train.runs import RunDirectory
from ddl.lab.train.stopping import SIGNALS
from tests.support.train_cases import quiet, short, stop_at

TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"]
HANDLED = ["--signals-to-handle", "SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1"]
LONG = ["tiny", "--steps", "1000000", "--eval-every", "10", "--eval-batches", "1", "--device=cpu"]


@pytest.mark.parametrize(
    ("number", "status"),
    [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129), (signal.SIGUSR1, 138)],
)
def test_a_signal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: signal.Signals, status: int
) -> None:
    """It saves and ends with the code that docs/runs.md has."""
    before = {n: signal.getsignal(n) for n in SIGNALS}
    stop_at(3, monkeypatch, number)
    trained = train(short(tmp_path, "additive"), quiet())
    assert trained.status == status
    assert trained.run.steps() == [3]
    assert {n: signal.getsignal(n) for n in SIGNALS} == before


def test_an_ignored_hangup_stays_ignored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stop_at(3, monkeypatch, signal.SIGHUP)
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        assert train(short(tmp_path, "additive"), quiet()).status == 0
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_terminal_that_is_closed(tmp_path: Path) -> None:
    """Nothing can be written to it any more, which is not the error of the run."""
    command = [sys.executable, "-m", "ddl", "train", *LONG, "--out", str(tmp_path / "run")]
    child, terminal = pty.fork()
    if child == 0:
        os.chdir(Path(ddl.__file__).parents[1])
        os.execv(sys.executable, command)
    shown = b""
    while b"validation loss" not in shown:
        shown += os.read(terminal, 4096)
    os.close(terminal)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 128 + signal.SIGHUP
    assert RunDirectory(tmp_path / "run").steps()


@pytest.mark.table(0)
@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGHUP])
def test_torchrun_sends_it_on(tmp_path: Path, number: signal.Signals) -> None:
    """SIGUSR1 only if it is requested, as docs/runs.md does; torchrun's own status is 1."""
    given = {
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(Path(ddl.__file__).parents[1]),
    }
    run = RunDirectory(tmp_path / "run")
    with subprocess.Popen(
        [*TORCHRUN, *HANDLED, "-m", "ddl", "train", *LONG, "--out", str(run.path)],
        env=os.environ | given, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    ) as process:  # fmt: skip
        end = time.monotonic() + 120
        while not run.steps() and time.monotonic() < end:
            time.sleep(0.1)
        process.send_signal(number)
        out, error = process.communicate(timeout=60)
    assert "Stopped after" in out, error
    assert process.returncode == 1
    assert run.steps()
