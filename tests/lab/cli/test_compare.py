"""`ddl compare`."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from ddl.lab.analysis.cost import CAPTION
from ddl.lab.cli import main
from ddl.lab.train.runs import load_config
from tests.lab.analysis.cases import make_run, write_evaluation
from tests.support.figures import saved_figure

NOT_UTF8 = os.fsdecode(b"\xff run")


def compare(*arguments: object) -> int:
    return main(["compare", *map(str, arguments)])


def test_tables_and_plot(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    runs = [make_run(tmp_path / name, losses=[3.0, 2.5]) for name in ("a[b]", "$x$")]
    before = sorted(tmp_path.rglob("*"))
    assert compare(*runs) == 0
    text = capsys.readouterr().out
    assert "a[b]" in text
    assert "$x$" in text
    assert "2.5000" in text
    assert sorted(tmp_path.rglob("*")) == before  # it writes nothing that is not asked for
    assert compare(*runs, "--plot", tmp_path / "x.png") == 0
    assert (tmp_path / "x.png").stat().st_size > 0
    assert capsys.readouterr().out.endswith(f"wrote {tmp_path / 'x.png'}\n")


@pytest.mark.parametrize(
    ("over", "label"),
    [("tokens", "tokens"), ("flops", "FLOPs"), ("seconds", "seconds of training")],
)
def test_what_a_plot_counts(tmp_path: Path, over: str, label: str) -> None:
    """The points lie where the runs were then, and a caption says what is between them."""
    runs = [make_run(tmp_path / name, name, losses=[3.0, 2.5]) for name in ("additive", "ddl-cc")]
    options = ["--plot", tmp_path / "x.png", "--over", over]
    figure = saved_figure(lambda: compare(*runs, *options))
    per_step = [load_config(run).flops_per_step for run in runs]
    expected = {
        "tokens": [[3 * 256, 6 * 256]] * 2,  # 8 × 32 in a step of these runs
        "flops": [[3 * flops, 6 * flops] for flops in per_step],
        "seconds": [[3 * 256 / 1000, 3 * 256 / 1000 + 3 * 256 / 2000]] * 2,
    }[over]
    (axes,) = figure.axes
    assert axes.get_xlabel() == label
    drawn = [list(line.get_xdata()) for line in axes.lines]
    for found, places in zip(drawn, [each for each in expected for _ in range(2)], strict=True):
        assert found == pytest.approx(places)
    assert [text.get_text() for text in figure.texts] == [CAPTION]
    assert CAPTION.startswith("Between points a curve is interpolated.")


def test_a_plot_over_steps_needs_no_caption(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", losses=[3.0, 2.5])
    figure = saved_figure(lambda: compare(run, "--plot", tmp_path / "x.png"))
    assert figure.axes[0].get_xlabel() == "step"
    assert list(figure.axes[0].lines[0].get_xdata()) == [3, 6]
    assert not figure.texts


def test_a_plot_over_seconds_names_the_runs_without(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = [make_run(tmp_path / name, losses=[3.0, 2.5]) for name in ("timed", "untimed")]
    lines = (runs[1] / "metrics.jsonl").read_text().replace("tokens_per_second", "speed")
    (runs[1] / "metrics.jsonl").write_text(lines)
    picture = ["--plot", tmp_path / "x.png", "--over"]
    assert compare(*runs, *picture, "seconds") == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "Without seconds of training, which are not recorded: untimed." in text
    assert compare(*runs, *picture, "flops") == 0
    assert "Without" not in capsys.readouterr().out


def test_a_name_that_is_not_utf8(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = make_run(tmp_path / "run")
    run.rename(tmp_path / NOT_UTF8)
    for options in ([], ["--markdown"], ["--json"]):
        assert compare(tmp_path / NOT_UTF8, "--plot", tmp_path / "x.png", *options) == 0
        assert "\ufffd run" in capsys.readouterr().out.replace("\\ufffd", "\ufffd")


def test_json_is_one_document_and_nothing_else(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = [
        make_run(tmp_path / f"{residual}-s{seed}", residual, seed=seed, losses=[loss, loss])
        for residual, loss in (("additive", 2.0), ("ddl", 1.5))
        for seed in (1, 2)
    ]
    write_evaluation(runs[0], {0: {"piqa": 60.0}})
    assert compare(*runs, "--json", "--paired", "--plot", tmp_path / "x.png") == 0
    captured = capsys.readouterr()
    made = json.loads(captured.out)
    assert captured.err == ""
    assert [run["name"] for run in made["runs"]] == [run.name for run in runs]
    assert made["runs"][0]["evaluations"][0]["scores"] == {"piqa": 60.0}
    assert made["runs"][3]["speed_ratio"] == 1.0
    assert made["paired"]["variants"][1]["difference"] == -0.5
    assert made["notes"] == [
        "At equal tokens, ddl is better than additive by 0.5000 (0.5000 to 0.5000)."
    ]
    assert made["paired"]["variants"][1]["flops_ratio"] > 1


def test_markdown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = make_run(tmp_path / "a_b", losses=[2.5])
    assert compare(run, "--markdown") == 0
    assert capsys.readouterr().out.startswith("| run | step |")


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ("", "`RUNS` must name at least one run directory, got nothing"),
        ("RUN --baseline x", "`--baseline` must be left out without `--paired`, got 'x'"),
        ("RUN --json --markdown", "`--markdown` must be left out with `--json`, got True"),
        ("RUN --data /nowhere", "`--data` must be a UTF-8 text, got /nowhere: No such file"),
        (
            f"RUN --data {__file__}",
            f"`RUNS` must have one that can be measured on `--data` {__file__}, got run: ",
        ),
        ("RUN --paired --baseline x", "`--baseline` must be one of run, got 'x'"),
        ("RUN --plot /proc/x.png", "`--plot` must be writable, got /proc/x.png: "),
        (
            "/nowhere",
            "`RUNS` must be a run directory of `ddl train`, a Hugging Face directory with a model"
            " of ddl, a Hugging Face directory with a converted decoder or a Hugging Face directory"
            " with another model, got /nowhere: No such file",
        ),
    ],
)
def test_a_sentence(
    tmp_path: Path, arguments: str, sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    run = str(make_run(tmp_path / "run"))
    assert compare(*(run if word == "RUN" else word for word in arguments.split())) == 1
    captured = capsys.readouterr()
    assert captured.err.startswith(f"ddl compare: {sentence}")
    assert captured.out == ""
