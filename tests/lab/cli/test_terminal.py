"""The commands at a terminal, with a closed pipe or a signal, by `ddl` and by `python -m ddl`."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from ddl.lab.cli import main
from ddl.lab.cli.terminal import interrupted_by_signals, nobody_reads
from ddl.lab.exchange import import_checkpoint
from ddl.lab.train import train
from tests.support.train_cases import quiet, short

BUFFERED = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
ENVIRONMENT = BUFFERED | {"OMP_NUM_THREADS": "1", "COLUMNS": "100"}  # buffered: flushed at exit
SCRIPT = Path(sys.executable).with_name("ddl")
SIZES = ("--model.hidden-size", "32", "--model.block-size", "32", "--device", "cpu")


# --- ddl and python -m ddl ------------------------------------------------------------------------


@pytest.mark.skipif(not SCRIPT.exists(), reason="the command is not installed beside Python")
@pytest.mark.parametrize(
    ("args", "status"),
    [("--help", 0), ("", 2), ("nope", 2), ("sample", 2), ("train --help", 0), ("train huge", 1)],
)
def test_ddl_and_python_m_ddl_are_the_same(args: str, status: int) -> None:
    ways = ([str(SCRIPT)], [sys.executable, "-m", "ddl"])
    answers = [
        subprocess.run([*way, *args.split()], capture_output=True, text=True, env=ENVIRONMENT)
        for way in ways
    ]
    assert [answer.returncode for answer in answers] == [status, status]
    assert answers[0].stdout == answers[1].stdout
    assert answers[0].stderr == answers[1].stderr
    said = answers[0].stdout + answers[0].stderr
    assert "ddl" in said
    assert "__main__" not in said


@pytest.mark.parametrize("args", ["--help", "", "nope", "compare nothing", "compare --help"])
def test_output_that_the_shell_has_closed(args: str) -> None:
    """`ddl … >&-`: Python has no standard output then."""
    command = f"{sys.executable} -m ddl {args} >&-"
    answer = subprocess.run(
        ["sh", "-c", command], stderr=subprocess.PIPE, text=True, env=ENVIRONMENT
    )
    assert "Traceback" not in answer.stderr
    assert answer.returncode == {"--help": 0, "compare --help": 0, "compare nothing": 1}.get(
        args, 2
    )


# --- ddl … | head ---------------------------------------------------------------------------------


def unread(*args: str, lines: int = 0) -> subprocess.Popen[str]:
    """Start the command, read `lines` lines of its output, and close the pipe."""
    process = subprocess.Popen(
        [sys.executable, "-m", "ddl", *args],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=ENVIRONMENT | {"PYTHONUNBUFFERED": "1"} if lines else ENVIRONMENT,
    )
    assert process.stdout is not None
    for _ in range(lines):
        assert process.stdout.readline()
    process.stdout.close()
    return process


def assert_quiet(process: subprocess.Popen[str]) -> None:
    assert process.stderr is not None
    said = process.stderr.read()
    assert process.wait(timeout=120) == 128 + 13, said
    assert said == ""


@pytest.mark.parametrize(
    "command", ["", "train", "sample", "demo", "eval", "export", "import"], ids=str
)
def test_help_that_nobody_reads(command: str) -> None:
    assert_quiet(unread(*command.split(), "--help"))


@pytest.mark.exhaustive
def test_a_training_that_nobody_reads(tmp_path: Path) -> None:
    """Training ends at the next printed line, and its files are complete."""
    options = ("--steps", "100000", "--eval-every", "20", "--out", str(tmp_path / "run"))
    assert_quiet(unread("train", "tiny", *SIZES, *options, lines=1))
    assert (tmp_path / "run" / "config.json").exists()
    assert not list((tmp_path / "run").glob(".*"))


def test_a_pipe_of_something_else_is_a_defect(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    from ddl.lab import cli

    def fail(args: list[str]) -> None:
        raise BrokenPipeError

    monkeypatch.setitem(cli.COMMANDS, "train", cli.COMMANDS["train"]._replace(run=fail))
    assert not nobody_reads()
    with pytest.raises(BrokenPipeError):
        cli.main(["train"])


# --- signals --------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
@pytest.mark.parametrize("command", ["export run --hf out", "import theirs out"])
def test_a_signal_leaves_no_half_written_files(
    command: str,
    number: signal.Signals,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    from ddl.hf.files import OurModel

    train(short(tmp_path, "additive", steps=1), quiet())
    import_checkpoint(tmp_path / "run", tmp_path / "theirs", reverse=True)
    before = sorted(tmp_path.rglob("*"))
    save = OurModel.save_pretrained

    def signalled(self: OurModel, folder: Path) -> None:
        save(self, folder)
        os.kill(os.getpid(), number)

    monkeypatch.setattr(OurModel, "save_pretrained", signalled)
    monkeypatch.chdir(tmp_path)
    handler = signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
    outside = signal.signal(number, handler)  # which may ignore it, as in the background
    try:
        assert main(command.split()) == 128 + number
        assert signal.getsignal(number) is handler
    finally:
        signal.signal(number, outside)
    assert capsys.readouterr().err == f"ddl {command.split()[0]}: interrupted\n"
    assert sorted(tmp_path.rglob("*")) == before


def test_an_ignored_signal_stays_ignored() -> None:
    """As under nohup."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with interrupted_by_signals():
            os.kill(os.getpid(), signal.SIGHUP)
    finally:
        signal.signal(signal.SIGHUP, before)
