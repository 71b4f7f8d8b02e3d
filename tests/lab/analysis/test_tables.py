"""The tables: at every width, with odd names, in Markdown and JSON."""

from __future__ import annotations

import io
import json
import math
import re
from pathlib import Path

import pytest
from rich.console import Console

from ddl.lab.analysis import tables
from ddl.lab.analysis.compare import compare
from ddl.lab.analysis.document import document
from ddl.lab.analysis.paired import pair
from tests.lab.analysis.cases import make_run, write_evaluation
from tests.lab.analysis.papers import ONE_SHOT, ZERO_SHOT


@pytest.fixture(scope="module")
def papers(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """A run for each model of the papers' tables."""
    folder = tmp_path_factory.mktemp("papers")
    runs = []
    for seed, (model, row) in enumerate(ONE_SHOT.items()):
        path = folder / model.replace(" ", "-")
        runs.append(make_run(path, model.split()[1], [3.0, 2.85426], seed=seed))
        zero = {0: ZERO_SHOT[model].by_task()} if model in ZERO_SHOT else {}
        write_evaluation(path, {**zero, 1: row.by_task()})
    return runs


def shown(paths: list[Path], width: int, *, paired: bool = False) -> str:
    compared = compare(paths)
    file = io.StringIO()
    console = Console(file=file, width=width, legacy_windows=False)
    tables.show(compared, console, pair(compared.runs) if paired else None)
    return file.getvalue()


def test_the_papers_numbers_are_printed(papers: list[Path]) -> None:
    text = shown(papers, 80)
    rows = {line.split()[0]: line.split() for line in text.split("1-shot")[1].splitlines() if line}
    for model, row in ONE_SHOT.items():
        cells = rows[model.replace(" ", "-")]
        assert cells[-1] == f"{row.average:.2f}"
        assert [float(cell) for cell in cells[1:-1]] == list(row.scores)
    assert "48.56" in text
    assert "49.29" in text
    assert "55.14" in text
    assert text.count("17.3616") == len(papers)


@pytest.mark.parametrize("width", [40, 60, 79, 80, 100, 132, 240])
def test_nothing_is_cut_at_any_width(papers: list[Path], width: int) -> None:
    text = shown(papers, width, paired=True)
    assert max(map(len, text.splitlines())) <= width
    assert "…" not in text
    for number in ("2.8543", "17.3616", "4.2814", "1,500", "1.000", "1.00 GB", "90.50", "55.14"):
        assert number in text
    for heading in ("val. loss", "perplexity", "bits/byte", "speed ratio", "WinoG", "mean"):
        assert heading in text


def test_at_80_columns_a_name_of_80_characters_is_broken_not_lost(tmp_path: Path) -> None:
    name = "cc-" + "-".join(f"option{n}" for n in range(9)) + "-s1"
    text = shown([make_run(tmp_path / name)], 80)
    first = [line.split("  ")[0].strip() for line in text.splitlines()]
    assert name in "".join(first)
    assert "2.5000" in text


def test_wide_consoles_show_one_table(papers: list[Path]) -> None:
    line = next(line for line in shown(papers, 160).splitlines() if "perplexity" in line)
    assert "memory ratio" in line
    line = next(line for line in shown(papers, 80).splitlines() if "perplexity" in line)
    assert line.endswith("bits/byte")  # what belongs together is divided last


def test_columns_that_nobody_has_are_left_out(tmp_path: Path) -> None:
    text = shown([make_run(tmp_path / "a", losses=[])], 80)
    assert "step" in text
    assert "0/6" in text
    for heading in ("perplexity", "tokens/s", "Accuracy", "memory"):
        assert heading not in text


@pytest.mark.parametrize(
    "name", ["a[b]", "[/bold]", "$x$", "a\\b", "-x", "a|b", "\x1b[31mred", "a\nb"]
)
def test_odd_names(tmp_path: Path, name: str) -> None:
    path = make_run(tmp_path / "runs" / name)
    text = shown([path], 80)
    assert "\x1b" not in text
    if name.isprintable():
        assert path.name in text
    rows = tables.markdown(compare([path])).splitlines()[:3]
    assert [row.replace("\\|", "").count("|") for row in rows] == [12, 12, 12]
    json.dumps(document(compare([path])), allow_nan=False)


def test_half_a_digit_is_rounded_up(tmp_path: Path) -> None:
    for score, printed in ((48.555, "48.56"), (48.565, "48.57"), (48.5549, "48.55"), (0.0, "0.00")):
        write_evaluation(tmp_path / "a", {0: {"piqa": score}})
        assert printed in shown([make_run(tmp_path / "a", overwrite=True)], 80)


def test_ratios() -> None:
    assert tables.ratios([2.0, 3.0, None]) == [1.0, 1.5, None]
    assert tables.ratios([None, 3.0]) == [None, None]
    assert tables.ratios([0.0, 3.0]) == [None, None]
    assert tables.ratios([]) == []


def test_the_paired_table(tmp_path: Path) -> None:
    runs = [
        make_run(tmp_path / f"{residual}-s{seed}", residual, [loss + seed / 10], seed=seed)
        for residual, loss in (("additive", 2.0), ("ddl-cc", 1.75))
        for seed in (1, 2)
    ]
    text = shown(runs, 80, paired=True)
    assert "difference from that of additive, seed by seed" in text
    row = next(line for line in text.splitlines() if line.startswith("ddl-cc "))
    assert row.split()[:7] == ["ddl-cc", "2", "1.9000", "−0.2500", "−0.2500", "to", "−0.2500"]
    assert re.search(r"95 % interval +FLOPs +seconds\n", text)
    made = document(compared := compare(runs), pair(compared.runs))
    assert made["paired"]["baseline"] == "additive"
    assert made["paired"]["variants"][1]["difference"] == pytest.approx(-0.25)
    assert made["paired"]["variants"][0]["low"] is None


def test_json_has_no_nan(tmp_path: Path) -> None:
    run = make_run(tmp_path / "a", losses=[2.0, math.nan])
    (described,) = json.loads(json.dumps(document(compare([run])), allow_nan=False))["runs"]
    assert described["validation_loss"] is described["perplexity"] is None
    assert described["best_validation_loss"] == 2.0
    assert described["finished"] is False


def test_markdown(papers: list[Path]) -> None:
    text = tables.markdown(compare(papers[:2]))
    first, *_ = text.split("\n\n")
    assert first.splitlines()[1] == "|---|" + "---:|" * 10
    assert "| small-additive | 6 | 2.8543 | 2.8543 | 17.3616 |" in first
    assert "Newest evaluation, accuracy in percent, 1-shot\n\n| run | ARC-C |" in text


@pytest.mark.parametrize("task", ["[/b]closed", "[red]wine", "[link=x]"])
def test_brackets_in_a_task_are_text(task: str, tmp_path: Path) -> None:
    run = make_run(tmp_path / "a", "ddl", [3.0, 2.9])
    write_evaluation(run, {0: {task: 60.0}})
    assert task in shown([run], 240)
