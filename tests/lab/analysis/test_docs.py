"""The sweep, the commands and the Python of docs/comparing.md run, and print what it shows."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from ddl.lab import cli
from ddl.lab.analysis import measured
from ddl.lab.analysis.compare import compare
from ddl.lab.analysis.document import document
from ddl.lab.analysis.student import quantile
from ddl.lab.config.sweeps import KEYS
from tests.lab.analysis.cases import make_run
from tests.support import ROOT

TEXT = (ROOT / "docs" / "comparing.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```$", TEXT, flags=re.MULTILINE | re.DOTALL)


def blocks(language: str) -> list[str]:
    return [text for kind, text in BLOCKS if kind == language]


def test_its_commands_and_python(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    sweep = blocks("toml")[0].replace("steps = 60", "steps = 2").replace("= 20", "= 2")
    Path("sweep.toml").write_text(sweep + "eval_batches = 1\n", encoding="utf-8")
    Path("other.txt").write_text("Another text than that of the runs. " * 5, encoding="utf-8")
    monkeypatch.setattr(measured, "SECONDS", 0.0)
    printed = ""
    for text in blocks("bash"):
        if "# a scheduler" in text:
            assert "--count" in text
            assert "--index $SLURM_ARRAY_TASK_ID" in text
            continue
        for line in text.splitlines():
            program, *arguments = shlex.split(line, comments=True)
            assert program == "ddl"
            assert cli.main(arguments) == 0
            printed += capsys.readouterr().out
    for line in blocks("text")[0].splitlines():
        if line.startswith(("run ", "variant ", "Final")):
            assert re.sub(r" +", " ", line) in re.sub(r" +", " ", printed)
    assert Path("losses.png").exists()
    assert Path("runs/sweep/loss.png").exists()
    names: dict[str, object] = {}
    exec(compile(blocks("python")[0], "docs/comparing.md", "exec"), names)
    assert len(names["losses"]) == 6  # type: ignore[arg-type]
    assert len(names["difference"]) == 3  # type: ignore[arg-type]


def test_the_keys_of_a_sweep() -> None:
    rows = set(re.findall(r"^\| `\[?(\w+)", TEXT.split("\n## ")[1], flags=re.MULTILINE))
    assert rows == set(KEYS)


def test_the_keys_of_the_document(tmp_path: Path) -> None:
    found = document(compare([make_run(tmp_path / "a")]))
    page = (ROOT / "docs" / "runs.md").read_text(encoding="utf-8")
    section = page.split("\n## Comparisons in JSON")[1]
    rows = re.findall(r"^\| (`.*?) \|", section, flags=re.MULTILINE)
    assert set(re.findall(r"`(\w+)`", " ".join(rows))) == {
        *found,
        "data",
        "inference",
        "paired",
        "curve",
    }
    (point, *_) = found["runs"][0]["curve"]
    names = {*point, *found["ranking"][0], "data", "inference", "curve", "evaluations"}
    assert names <= set(re.findall(r"`(\w+)`", section))


def test_the_quantiles_that_it_names() -> None:
    told = re.search(r"t is ([\d.]+) there, ([\d.]+) with three, ([\d.]+) with\s+five", TEXT)
    assert told
    assert told.groups() == tuple(f"{quantile(0.95, n - 1):.1f}" for n in (2, 3, 5))
