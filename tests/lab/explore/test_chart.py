"""Curves and heat maps as characters."""

from __future__ import annotations

import numpy as np
import pytest

from ddl.lab.analysis.labels import spread
from ddl.lab.explore.chart import Line, draw
from ddl.lab.explore.heat import heat, shade
from ddl.lab.explore.series import Curve
from ddl.lab.explore.words import compact, rows, safe, safe_line, shorten, wrap


def curve(*values: float, first: float = 0.0) -> Curve:
    return Curve(np.arange(len(values)) + first, np.array(values, dtype=float))


def shown(*lines: Line, width: int = 32, height: int = 8, **options: object) -> list[str]:
    return draw(lines, width, height, **options).plain.split("\n")  # type: ignore[arg-type]


def test_lines_letters_and_axes() -> None:
    lines = [Line(curve(5, 3, 1), "a", ""), Line(curve(4, 4, 4), "b", "red", faint=True)]
    assert shown(*lines, width=30) == [
        " ┌───────────────────────────┐",
        " │a⠒⠤⢄⣀                      │",
        "4┤⠒⠒⠒⠒⠒⠉⠑⠒⠤⢄⣀⠒⠒⠒⠒⠒⠒⠒⠒⠒⠒⠒⠒⠒⠒⠒⠒│",
        " │           ⠉⠑⠒⠤⣀⡀          │",
        "2┤                ⠈⠑⠒⠤⢄⡀     │",
        " │                     ⠈⠉⠒⠤⢄a│",
        " └┬────────────┬────────────┬┘",
        "  0            1            2 ",
    ]


def test_a_logarithmic_axis_leaves_out_what_is_not_positive() -> None:
    text = shown(Line(curve(0, 1, 10, 100, 1000, -5), "a", ""), log=True, height=14)
    labels = [line.split("┤")[0].strip() for line in text if "┤" in line]
    assert labels == ["1000", "100", "10", "1"]
    short = shown(Line(curve(2.1, 3.4), "a", ""), log=True, height=14)
    assert [line.split("┤")[0].strip() for line in short if "┤" in line] == ["3", "2.5"]
    assert "nothing to draw" in shown(Line(curve(0, -1), "a", ""), log=True)[0]


def test_values_above_the_top_are_cut_off() -> None:
    line = Line(curve(100, 2, 1), "a", "")
    assert "100" not in "".join(shown(line, top=2.5)[:-1])
    assert "100" in "".join(shown(line)[:-1])


@pytest.mark.parametrize(
    "values", [(1.0,), (2.0, 2.0), (1.7e308, -1.7e308, 0.1), (1e-12, 2e-12), (1e15,) * 3]
)
@pytest.mark.parametrize("log", [False, True])
def test_odd_ranges(values: tuple[float, ...], log: bool) -> None:
    late = curve(*values, first=7)
    lines = [Line(late, "a", ""), Line(late.smoothed(), "b", "red", faint=True)]
    for width, height in ((24, 5), (80, 24)):
        text = shown(*lines, log=log, width=width, height=height)
        assert len(text) == height
        assert all(len(line) <= width for line in text)


def test_many_points_take_little_time() -> None:
    many = Curve(np.arange(300_000.0), np.random.default_rng(0).normal(size=300_000))
    assert len(shown(Line(many, "a", ""), width=160, height=50)) == 50


def test_nothing_and_no_room() -> None:
    assert shown() == ["There is nothing to draw yet."]
    assert shown(Line(curve(1), "a", ""), width=10) == ["The window is too small for curves."]


def test_a_heat_map_has_numbers_and_colours() -> None:
    values = np.array([[0.0, 0.5], [np.nan, 1.0]])
    text = heat(values, ["x", "y"], ["1", "20"], lambda v: f"{v:.1f}")
    assert text.plain == "    1  20\nx 0.0 0.5\ny   · 1.0"
    styles = [str(span.style) for span in text.spans]
    assert styles == [shade(0.0), shade(0.5), shade(1.0)]
    assert shade(0.0) == "#ffffff on #440154"
    assert shade(1.0) == "#000000 on #fde725"


def test_columns_that_do_not_fit_are_spread_evenly() -> None:
    assert spread(3, 5) == [0, 1, 2]
    assert spread(101, 5) == [0, 25, 50, 75, 100]
    assert spread(100, 0) == [0, 99]


# --- text -----------------------------------------------------------------------------------------


def test_text_that_a_terminal_would_obey() -> None:
    assert safe("a\x1b[31m\tb\nc\u202e\ud800\x9b\u2028") == "a\ufffd[31m  b\nc" + "\ufffd" * 4
    assert safe_line("a\nb") == "a\ufffdb"
    assert safe("ä 漢 k̂ [red]") == "ä 漢 k̂ [red]"


def test_lines_of_a_width() -> None:
    assert wrap("  two words", 6) == "  two\nwords"
    assert wrap("abcdefgh", 3) == "abc\ndef\ngh"
    assert wrap("漢字漢字", 4) == "漢字\n漢字"
    assert wrap("a\n\n b", 9) == "a\n\n b"
    assert shorten("abcdefghij", 5) == "ab…ij"
    assert shorten("abc", 3) == "abc"
    assert rows([["a", "b"], ["漢", "10"]]) == "a    b\n漢  10"


def test_numbers_of_an_axis() -> None:
    numbers = (0, 3e-4, 2.9465, 1500, 14_200, 1.5e6, 2e9, -14_200)
    found = [compact(number) for number in numbers]
    assert found == ["0", "0.0003", "2.946", "1500", "14.2k", "1500k", "2G", "-14.2k"]


def test_a_running_mean_forgets_what_lies_before_its_window() -> None:
    """A running sum of all values would lose the small ones after a perplexity of 1e20."""
    values = curve(1e20, *[2.0] * 99)
    assert values.smoothed().values[-1] == 2.0
