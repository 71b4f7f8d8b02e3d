"""`ddl explore` from the command line: refusals, a real terminal, a signal."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ddl.lab import cli

FOLDERS = "`RUNS` must be run directories or folders with runs"
NO_RUNS = (
    f"{FOLDERS}, got none: `ddl train tiny --out runs/tiny` makes one in seconds, and `ddl"
    " explore runs` shows it"
)


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ddl.lab.cli.explore.require_terminal", lambda: None)


def test_without_a_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["explore", str(tmp_path)]) == 1
    error = capsys.readouterr().err
    assert error == (
        f"ddl explore: standard {'input' if not sys.stdin.isatty() else 'output'} must be a"
        " terminal, got a file or a pipe: `ddl compare` prints tables\n"
    )


@pytest.mark.usefixtures("terminal")
@pytest.mark.parametrize(
    ("args", "sentence"),
    [
        ("", NO_RUNS),
        ("nowhere", f"{FOLDERS}, got nowhere, nothing there"),
        (__file__, f"{FOLDERS}, got {__file__}, a file"),
        (". --interval 0", "`--interval` must be a positive finite number, got 0.0"),
    ],
)
def test_a_sentence(args: str, sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["explore", *args.split()]) == 1
    assert capsys.readouterr().err == f"ddl explore: {sentence}\n"


@pytest.mark.usefixtures("terminal")
def test_without_textual(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in sys.modules if name.startswith("ddl.lab.explore.screen")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "textual", None)
    monkeypatch.setitem(sys.modules, "textual.app", None)
    assert cli.main(["explore", str(tmp_path)]) == 1
    sentence = "`ddl explore` needs the `explore` extra: pip install 'ddl-rs[explore]'"
    assert capsys.readouterr().err == f"ddl explore: {sentence}\n"


def test_in_a_terminal_a_signal_ends_it_and_leaves_the_terminal_usable(run: Path) -> None:
    ours, theirs = pty.openpty()
    environment = os.environ | {"TERM": "xterm-256color"}
    command = [sys.executable, "-m", "ddl", "explore", str(run)]
    process = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=environment)
    os.close(theirs)
    written = b""
    started, sent = time.monotonic(), False
    try:
        while process.poll() is None and time.monotonic() - started < 60:
            try:
                written += os.read(ours, 2**16)
            except OSError:  # the other end is closed
                break
            if b"finished" in written and not sent:  # a second one would meet it on its way out
                process.send_signal(signal.SIGTERM)
                sent = True
        assert process.wait(20) == 128 + signal.SIGTERM
    finally:
        process.kill()
        os.close(ours)
    assert b"\x1b[?1049h" in written  # the alternate screen, on and off again
    assert b"\x1b[?1049l" in written
