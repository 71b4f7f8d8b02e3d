"""The commands of docs/reports.md run and write a page with what its table names."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

pytest.importorskip("plotly", reason="needs the extra `report`")

from ddl.lab import cli
from ddl.lab.analysis.report import charts, curves, page
from tests.lab.analysis.report_cases import Page
from tests.support import ROOT

TEXT = (ROOT / "docs" / "reports.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```bash\n(.*?)^```$", TEXT, flags=re.MULTILINE | re.DOTALL)


def test_its_commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for line in BLOCKS[1].splitlines():
        program, *arguments = shlex.split(re.sub(r"(-every) \d+", r"\1 1", line))
        assert program == "ddl"
        short = ["--steps", "2", "--eval-every", "1", "--eval-batches", "1"]
        assert cli.main(arguments + (short if arguments[0] == "train" else [])) == 0
    written = Page(Path("page.html"))
    assert list(written.charts) == ["losses", *(f"depth-1-{n}" for n in range(4)), "training-1"]
    assert set(written.texts("h2")) > {"Comparison", "Loss curves", "Samples", "Configuration"}


def test_the_numbers_that_it_names() -> None:
    told = re.search(r"to (\d+) points, recordings to\s+(\d+) steps and samples to (\d+)", TEXT)
    assert told
    expected = (curves.MOST_POINTS, charts.MOST_STEPS, page.MOST_SAMPLES)
    assert tuple(map(int, told.groups())) == expected
