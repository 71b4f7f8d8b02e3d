"""`ddl report` of runs that lack something or have damaged files, and the file that it writes."""

from __future__ import annotations

import math
import re
import sys
from pathlib import Path

import pytest

pytest.importorskip("plotly", reason="needs the extra `report`")

from ddl.errors import InputError
from ddl.lab import cli
from ddl.lab.analysis.report.charts import thinned
from ddl.lab.analysis.report.page import write_report
from ddl.lab.config import ReportConfig
from tests.lab.analysis.cases import make_run, write_evaluation
from tests.lab.analysis.conftest import Write
from tests.lab.analysis.report_cases import three_runs, write_inspection, write_recordings


def test_the_missing_parts_are_named(tmp_path: Path, write: Write) -> None:
    runs = [*three_runs(tmp_path), make_run(tmp_path / "bare-s1", "ddl-cc", losses=[])]
    page = write(*runs)
    assert [link.text for link in page.all("a")][2:4] == ["Inside full-s1", "Inside half-s1"]
    assert "It was not inspected: ddl inspect measures its sublayers." in page.texts("p")
    assert page.texts("li")[-2:] == [
        f"{name}: It was not inspected: ddl inspect measures its sublayers. It recorded nothing"
        " over training: --record-every does."
        for name in ("plain-s1", "bare-s1")
    ]
    commands = page.texts("code")
    assert {"ddl inspect", "--record-every"} <= set(commands)
    assert "`" not in "".join(commands)
    assert "Not finished: bare-s1 (0 of 6 steps)." in page.texts("li")


def test_a_run_that_has_only_begun(tmp_path: Path, write: Write) -> None:
    page = write(make_run(tmp_path / "a", losses=[]))
    assert page.charts == {}
    assert page.texts("h2") == ["Comparison", "Runs without heat maps", "Configuration"]
    assert page.texts("a") == ["Comparison", "Configuration"]


def test_a_run_that_diverged(tmp_path: Path, write: Write) -> None:
    run = make_run(tmp_path / "a", losses=[3.0, math.nan, None])
    page = write(run)
    assert [trace["y"] for trace in page.charts["losses"]["data"]] == [[3.0], [3.0]]
    assert "nan" in page.rows(0)[1]
    alone = make_run(tmp_path / "b", losses=[math.nan])
    assert write(alone).charts == {}


def test_half_a_line_and_steps_twice(tmp_path: Path, write: Write) -> None:
    """A run that goes on may be written to; one that was resumed may have a step twice."""
    run = make_run(tmp_path / "a", "ddl")
    file = write_recordings(run, steps=[2, 4, 4])
    with file.open("a") as lines:
        lines.write('{"step": 6, "subl')
    page = write(run)
    assert page.charts["training-0"]["data"][0]["x"] == ["2", "4"]


def test_an_exported_model(tmp_path: Path, write: Write) -> None:
    write_evaluation(tmp_path / "hf", {0: {"piqa": 60.0}})
    (tmp_path / "hf" / "config.json").write_text('{"model_type": "ddl"}')
    write_inspection(tmp_path / "hf", channels=1)
    page = write(tmp_path / "hf")
    assert set(page.charts) == {f"depth-0-{number}" for number in range(4)}
    assert page.texts("h2") == ["Comparison", "Inside hf"]


def test_unknown_numbers_are_gaps(tmp_path: Path, write: Write) -> None:
    run = make_run(tmp_path / "a", "ddl")
    coherence = [[math.nan, "x"], [None, 10**400]]
    write_inspection(run, sublayers=2, coherence=coherence, tokens="many")
    page = write(run)
    assert page.charts["depth-0-2"]["data"][0]["z"] == [[None, None], [None, None]]


def test_long_runs_are_thinned(tmp_path: Path, write: Write) -> None:
    run = make_run(tmp_path / "a", "ddl", losses=[3.0] * 1500, steps=3000)
    write_recordings(run, steps=range(1, 1001), sublayers=2)
    page = write(run)
    assert [len(trace["x"]) for trace in page.charts["losses"]["data"]] == [600, 600]
    chart = page.charts["training-0"]
    assert len(chart["data"][0]["x"]) == len(chart["choices"][0][0]) == 200
    assert chart["data"][0]["x"][-1] == "1000"
    assert thinned(range(10), 4) == [0, 3, 6, 9]


# --- damaged files --------------------------------------------------------------------------------

SQUARE = "no `coherence` of 4 × 4 numbers"


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("{", "Expecting property name"),
        ("[]", "no object"),
        ('{"format": 2}', "format 2 instead of 1; if a newer ddl-rs wrote it, install"),
        ('{"format": 1, "sublayers": []}', "no `sublayers`"),
        ('{"format": 1, "sublayers": [3]}', "no `sublayers`"),
        ('{"format": 1, "sublayers": [{}]}', "no `eigenvalue_counts` of 1 × 40 numbers"),
        ({"coherence": [[1.0]]}, SQUARE),
        ({"coherence": None}, SQUARE),
        ({"coherence": [1.0, 2.0, 3.0, 4.0]}, SQUARE),
        ({"survival": {}}, "no `survival` of 5 × 5 numbers"),
        ("[" * 100_000, "JSON that is nested too deeply"),
    ],
)
def test_a_damaged_inspection(
    tmp_path: Path, write: Write, text: str | dict[str, object], reason: str
) -> None:
    run = make_run(tmp_path / "a", "ddl")
    file = write_inspection(run, **(text if isinstance(text, dict) else {}))
    if isinstance(text, str):
        file.write_text(text)
    start = f"`runs` must have inspections of `ddl inspect`, got {file}: {reason}"
    with pytest.raises(InputError, match=f"^{re.escape(start)}"):
        write(run)
    assert not (tmp_path / "page.html").exists()


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ('{"step": 8}', "no `sublayers`"),
        ('{"step": 8, "sublayers": [{"name": "other"}]}', "steps with different sublayers"),
    ],
)
def test_damaged_recordings(tmp_path: Path, write: Write, line: str, reason: str) -> None:
    run = make_run(tmp_path / "a", "ddl")
    file = write_recordings(run)
    with file.open("a") as lines:
        lines.write(line + "\n")
    sentence = f"`runs` must have recordings of `ddl train`, got {file}: {reason}"
    with pytest.raises(InputError, match=f"^{re.escape(sentence)}$"):
        write(run)


# --- the file -------------------------------------------------------------------------------------


def test_the_same_runs_give_the_same_bytes(tmp_path: Path) -> None:
    runs = tuple(three_runs(tmp_path / "runs"))
    for name in ("one.html", "two.html"):
        write_report(ReportConfig(runs, out=tmp_path / name))
    one = (tmp_path / "one.html").read_bytes()
    assert one == (tmp_path / "two.html").read_bytes()
    assert 3e6 < len(one) < 6e6  # the size that docs/reports.md names
    assert sorted(path.name for path in tmp_path.iterdir()) == ["one.html", "runs", "two.html"]


def test_only_a_report_is_replaced(tmp_path: Path, write: Write) -> None:
    run, out = make_run(tmp_path / "a"), tmp_path / "page.html"
    write(run)
    before = out.read_bytes()
    write(run, make_run(tmp_path / "b"))
    assert out.read_bytes() != before
    out.write_text("<!doctype html>\n<p>Another page</p>")
    sentence = (
        f"`out` must be a new file or an earlier report, got {out}, another file: choose another"
        " or add --overwrite"
    )
    with pytest.raises(InputError, match=f"^{re.escape(sentence)}$"):
        write(run)
    assert out.read_text().endswith("Another page</p>")
    write(run, overwrite=True)
    assert out.read_bytes() == before


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = [str(run) for run in three_runs(tmp_path)]
    assert cli.main(["report", *runs, "--out", str(tmp_path / "x.html")]) == 0
    said = capsys.readouterr().out
    assert said.startswith("Not a fair comparison with plain-s1: half-s1 with 8 steps, not 6.\n")
    assert said.endswith(f"wrote {tmp_path}/x.html\n")


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ("", "`RUNS` must name at least one run directory, got nothing"),
        ("RUN --baseline x", "`--baseline` must be left out without `--paired`, got 'x'"),
        ("RUN --out /proc/x.html", "`--out` must be writable, got /proc/x.html: "),
        ("RUN --out /proc", "`--out` must be a file, got /proc: Is a directory"),
        ("/nowhere", "`RUNS` must be a run directory of `ddl train`, a Hugging Face directory"),
    ],
)
def test_a_sentence(
    tmp_path: Path, arguments: str, sentence: str, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    run = str(make_run(tmp_path / "run"))
    assert cli.main(["report", *(run if a == "RUN" else a for a in arguments.split())]) == 1
    captured = capsys.readouterr()
    assert captured.err.startswith(f"ddl report: {sentence}")
    assert captured.out == ""


def test_without_plotly(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "ddl.lab.analysis.report.page", raising=False)
    monkeypatch.setitem(sys.modules, "plotly.offline", None)
    assert cli.main(["report", str(make_run(tmp_path / "a"))]) == 1
    sentence = "ddl report: `ddl report` needs the `report` extra: pip install 'ddl-rs[report]'\n"
    assert capsys.readouterr().err == sentence
