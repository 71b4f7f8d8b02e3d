"""The loss curves: nothing overlaps, every curve has its own look, and bad numbers are left out."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from ddl.lab.train.json_lines import number
from ddl.lab.train.plots import COLOURS, plot_losses, smooth
from tests.support.figures import saved_figure

RECORDS = [{"step": s, "loss": 4 - s / 9, "validation_loss": 4.1 - s / 9} for s in range(1, 9)]


def drawn(
    tmp_path: Path, runs: Mapping[str, Sequence[Any]], variants: Mapping[str, str] | None = None
) -> Figure:
    """The figure that is saved."""
    return saved_figure(lambda: plot_losses(runs, tmp_path / "plot.png", variants=variants))


@pytest.mark.parametrize("count", [1, 2, 9, 60])
@pytest.mark.parametrize(
    "name", ["a{}", "a-long-name-of-a-variant-with-lr0.00{}-s1337", "name" * 30 + "{}"]
)
def test_the_legend_covers_no_curve_and_is_whole(tmp_path: Path, count: int, name: str) -> None:
    figure = drawn(tmp_path, {name.format(n): RECORDS for n in range(count)})
    renderer = FigureCanvasAgg(figure).get_renderer()
    (legend,) = figure.legends
    box, axes = legend.get_window_extent(renderer), figure.axes[0].get_tightbbox(renderer)
    assert axes is not None
    assert box.y1 <= axes.y0 + 1
    assert box.y0 >= 0
    assert box.x0 >= 0
    assert box.x1 <= figure.bbox.x1
    assert len(legend.get_texts()) == count


def test_every_curve_has_its_own_look(tmp_path: Path) -> None:
    figure = drawn(tmp_path, {str(n): RECORDS for n in range(28)})
    lines = [line for line in figure.axes[0].lines if line.get_marker() not in (None, "None")]
    looks = {(line.get_color(), line.get_marker()) for line in lines}
    assert len(looks) == 28
    in_grey = {(line.get_marker(), line.get_linestyle()) for line in lines[: len(COLOURS)]}
    assert len(in_grey) == len(COLOURS)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("a\x1b[31m", "a\\x1b[31m"),
        ("a\tb\nc", "a\\tb\\nc"),
        ("\x85犰🙂", "\\x85犰🙂"),
        ("\udcff", "?"),
    ],
)
def test_a_name_of_odd_characters_is_drawn_without_a_warning(
    name: str, shown: str, tmp_path: Path
) -> None:
    figure = drawn(tmp_path, {name: RECORDS})
    assert [text.get_text() for text in figure.legends[0].get_texts()] == [shown]


def test_runs_of_a_variant_look_alike(tmp_path: Path) -> None:
    variants = {"a-s1": "a", "a-s2": "a", "b-s1": "b"}
    figure = drawn(tmp_path, dict.fromkeys(variants, RECORDS), variants)
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["a", "b"]
    colours = [line.get_color() for line in figure.axes[0].lines]
    assert colours == [COLOURS[0]] * 4 + [COLOURS[1]] * 2


def test_what_is_no_finite_number_is_left_out(tmp_path: Path) -> None:
    for bad in (None, math.nan, math.inf, "x", True, 10**400):
        assert number({"loss": bad}, "loss") is None
        records = [*RECORDS, {"step": 9, "loss": bad, "validation_loss": bad}]
        axes = drawn(tmp_path, {"a": records}).axes[0]
        assert [len(line.get_xdata()) for line in axes.lines] == [8, 8]
        assert math.isfinite(axes.get_ylim()[1])


def test_without_any_record(tmp_path: Path) -> None:
    drawn(tmp_path, {"a": [], "b": RECORDS})
    drawn(tmp_path, {})


@pytest.mark.parametrize("count", [0, 1, 29, 59, 60, 61, 100, 1000])
def test_smoothing_is_a_running_mean(count: int) -> None:
    values = [math.sin(i) + i for i in range(count)]
    width = max(1, count // 30)
    windows = [values[max(0, i + 1 - width) : i + 1] for i in range(count)]
    assert smooth(values) == pytest.approx([sum(w) / len(w) for w in windows], rel=1e-12)


def test_a_spike_spoils_no_mean_after_it() -> None:
    values = [1e30, *[2.0] * 299]
    assert smooth(values)[10:] == pytest.approx([2.0] * 290, rel=1e-12)


def test_smoothing_a_long_run_takes_time_in_proportion() -> None:
    values = [2.0] * 500_000  # 500,000² / 30 additions, done one by one, take minutes
    began = time.process_time()
    assert smooth(values)[-1] == pytest.approx(2.0)
    assert time.process_time() - began < 20


@pytest.mark.parametrize("loss", [1e308, -1e308, 1e300, -1e300])
def test_huge_losses_can_be_drawn(tmp_path: Path, loss: float) -> None:
    last = {"step": 9, "validation_loss": loss, "loss": -loss}
    plot_losses({"a": [*RECORDS, last]}, tmp_path / "huge.png")
    plot_losses({"a": RECORDS}, tmp_path / "usual.png")
    huge, usual = (plt.imread(tmp_path / name) for name in ("huge.png", "usual.png"))
    assert huge.shape == usual.shape
    drawn = abs(loss) < 1e308  # the axis would end beyond the largest float
    assert (huge != usual).any() == drawn
