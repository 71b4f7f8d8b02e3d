"""`make sanitize`: the commands that it runs, and its messages if it cannot."""

from __future__ import annotations

import importlib.util
import stat
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

FOLDER = Path(__file__).parents[1] / "gpu"


@pytest.fixture
def sanitize() -> ModuleType:
    spec = importlib.util.spec_from_file_location("sanitize", FOLDER / "sanitize.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def stand_in(folder: Path, status: dict[str, int]) -> None:
    """Write a compute-sanitizer that logs its command line and exits with the tool's `status`."""
    script = folder / "compute-sanitizer"
    lines = [f'case "$2" in {tool}) exit {code};; esac' for tool, code in status.items()]
    script.write_text("\n".join(["#!/bin/sh", f'echo "$@" >> {folder}/log', *lines]) + "\n")
    script.chmod(script.stat().st_mode | stat.S_IXUSR)


def test_every_tool_runs_and_one_failure_counts(
    sanitize: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    stand_in(tmp_path, {"initcheck": 9})
    assert sanitize.main([]) == 1
    assert "sanitize: initcheck failed" in capfd.readouterr().out
    runs = (tmp_path / "log").read_text().splitlines()
    assert [run.split()[1] for run in runs] == list(sanitize.TOOLS)
    assert all(run.endswith(str(FOLDER)) and "--all" in run.split() for run in runs)
    assert sanitize.main(["memcheck", "synccheck"]) == 0


def test_the_tests_it_chooses_exist(sanitize: ModuleType) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "--all", "--collect-only"]
    listed = subprocess.run(
        [*command, "-p", "no:cacheprovider", "-k", sanitize.CHOSEN, str(FOLDER)],
        capture_output=True,
        text=True,
        timeout=120,
    ).stdout
    for name in ("test_rewrite_read[4-token-384-torch.bfloat16]", "test_expand[4-4-torch.float32]"):
        assert name in listed
    assert "test_wide_states[4096-4-channel]" in listed
    for name in ("test_any_batch_shape[token-batch", "[200]", "test_unaligned_views[63--"):
        assert name in listed
    assert 30 < listed.count("::test_") < 80


def test_what_is_missing_is_said(
    sanitize: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sanitize, "find_sanitizer", lambda: None)
    assert sanitize.main([]) == 1
    assert "compute-sanitizer was not found on the PATH" in capsys.readouterr().err
    monkeypatch.setattr(sanitize, "find_sanitizer", lambda: "compute-sanitizer")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert sanitize.main([]) == 1
    assert "needs an NVIDIA GPU, and torch finds none" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        sanitize.main(["memchek"])
    assert "a tool must be one of memcheck, racecheck," in capsys.readouterr().err
