"""The commands of docs/training.md run in order, and docs/runs.md names what they leave."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from ddl.lab import cli
from ddl.lab.train.resume import FREE
from ddl.lab.train.runs import FILES, RunDirectory
from tests.support import ROOT

TEXT, RUNS = (
    (ROOT / "docs" / page).read_text(encoding="utf-8") for page in ("training.md", "runs.md")
)
COMMANDS = [
    shlex.split(line, comments=True)
    for block in re.findall(r"^```bash\n(.*?)^```$", TEXT, flags=re.MULTILINE | re.DOTALL)
    for line in block.splitlines()
]


def test_the_commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for program, *arguments in COMMANDS:
        assert program == "ddl"
        assert cli.main(arguments) == 0
    run = RunDirectory(Path("runs/first"))
    assert run.steps()[-1] == 60
    assert "checkpoints/step-00000060" in RUNS
    assert run.checkpoint_path(60).is_dir()
    entries = {path.name for path in run.path.iterdir()}
    assert entries <= set(FILES)
    assert all(f"`{name}" in RUNS for name in entries)


def test_the_options_that_may_change() -> None:
    allowed = {name.replace("_", "-") for name in FREE} - {"out", "overwrite", "resume"}
    sentence = re.search(r"These may change: (.*?)\. ", TEXT.replace("\n", " "))
    assert sentence
    assert set(re.findall(r"`--([a-z-]+)`", sentence[1])) == allowed
