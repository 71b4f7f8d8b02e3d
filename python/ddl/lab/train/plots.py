"""Plots of training runs."""

from __future__ import annotations

import itertools
import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ddl.files import atomic_file
from ddl.lab.output import one_line

from .json_lines import Record, number

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito's colours, which the colour-blind can tell apart, without the yellow, which is too
# pale for a line. Markers and dashes tell the curves apart where there is no colour.
COLOURS = ("#000000", "#E69F00", "#0072B2", "#009E73", "#CC79A7", "#D55E00", "#56B4E9")
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "<", ">", "*", "p")
DASHES = ("-", (0, (5, 2)), (0, (1, 1.5)), (0, (5, 2, 1, 2)))
WIDTH, HEIGHT = 7.0, 4.2  # inches of a figure without its legend
LEGEND_CHARACTERS = 112  # in a row of the legend
LONGEST = 72  # characters of a name
TOP = 1.2  # end of the y-axis, as a multiple of the highest validation loss
ROW = 0.19  # inches of a row of the legend
CAPTION = 0.35  # inches of the caption's two lines


class Places(NamedTuple):
    """Where the records of each run lie on the x-axis, and None for a record without a place.

    label: of the axis. caption: at most two lines below the legend.
    """

    label: str
    of: Mapping[str, Sequence[float | None]]
    caption: str = ""


@contextmanager
def without_glyph_warnings() -> Iterator[None]:
    """Draw a character that the font lacks as a box, without matplotlib's warning on the output."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph ")
        yield


@without_glyph_warnings()
def plot_losses(
    runs: Mapping[str, Sequence[Record]],
    path: Path,
    *,
    variants: Mapping[str, str] | None = None,
    argument: str = "out",
    places: Places | None = None,
) -> None:
    """Plot each run's validation loss (markers) and smoothed training loss as a PNG.

    variants: the variant of each run; runs of one variant look alike and share an entry of the
    legend, which is below the curves. argument: names the path in an error message. places: where
    the records lie on the x-axis; None for their steps. The y-axis is cut above the validation
    losses, because the first training losses are far higher.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    groups: dict[str, list[str]] = {}
    for name in runs:
        groups.setdefault((variants or {}).get(name, name), []).append(name)
    names = [_label(name) for name in groups]
    columns, rows = _legend_size(names)
    caption = CAPTION if places is not None and places.caption else 0.0
    figure, axes = pyplot.subplots(figsize=(WIDTH, HEIGHT + ROW * rows + caption), dpi=150)
    dashes = [dash for dash in DASHES for _ in COLOURS]  # another when the colours are used up
    looks = zip(*map(itertools.cycle, (COLOURS, MARKERS, dashes)), strict=False)
    highest = 0.0
    for name, group, look in zip(names, groups.values(), looks, strict=False):
        for i, run in enumerate(group):
            at = None if places is None else places.of[run]
            highest = max(highest, _draw(axes, runs[run], look, "" if i else name, at))
    if highest > 0:
        axes.set_ylim(top=TOP * highest)
    xlabel = "step" if places is None else places.label
    title = "Loss on validation (markers) and training data (faint)"
    axes.set(xlabel=xlabel, ylabel="loss, nats per token", title=title)
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    if names:
        _add_legend(figure, columns, rows, caption)
    if places is not None and places.caption:
        figure.text(0.5, 0.05 / figure.get_figheight(), places.caption, ha="center", fontsize=7)
    with atomic_file(path, argument=argument) as temporary:
        figure.savefig(temporary, format="png")
    pyplot.close(figure)


def _draw(
    axes: Axes,
    records: Sequence[Record],
    look: Sequence[Any],
    label: str,
    places: Sequence[float | None] | None,
) -> float:
    """Draw a run; return its highest validation loss."""
    colour, marker, dash = look
    training, validation = (curve(records, key, places) for key in ("loss", "validation_loss"))
    axes.plot(training[0], smooth(training[1]), color=colour, linestyle=dash, alpha=0.35, lw=1)
    marked = max(1, math.ceil(len(validation[0]) / 12))  # more markers would hide the line
    style: dict[str, Any] = {"color": colour, "linestyle": dash, "marker": marker}
    style |= {"markersize": 5, "markevery": marked, "markerfacecolor": "white", "lw": 1.4}
    axes.plot(*validation, label=label or "_", **style)
    return max(validation[1], default=0.0)


def _legend_size(names: Sequence[str]) -> tuple[int, int]:
    """Columns and rows of a legend below the axes."""
    longest = max(map(len, names), default=0) + 13  # characters that line and margin take
    columns = max(1, min(len(names), LEGEND_CHARACTERS // longest))
    return columns, math.ceil(len(names) / columns)


def _add_legend(figure: Figure, columns: int, rows: int, caption: float) -> None:
    """Put the legend below the axes, where it covers no curve, and make room for it.

    caption: inches that are left below it.
    """
    height = figure.get_figheight()
    place: dict[str, Any] = {"loc": "lower center", "ncols": columns, "frameon": False}
    place["bbox_to_anchor"] = (0.5, caption / height)
    legend = figure.legend(**place, fontsize=8, handlelength=3.2, borderaxespad=0.2)
    for text in legend.get_texts():
        text.set_parse_math(False)  # a name may have $
    figure.tight_layout(rect=(0, (ROW * rows + caption + 0.05) / height, 1, 1))


def _label(name: str) -> str:
    """The name without its middle if it is too long for the figure.

    matplotlib hides labels that start with an underscore.
    """
    shown = shorten(printed(name), LONGEST)
    return shown.replace("_", "\u2009_", name.startswith("_"))


def printed(name: str) -> str:
    """The name, as far as it is UTF-8, with escapes for control characters."""
    return one_line(name.encode("utf-8", "replace").decode())


def shorten(text: str, most: int) -> str:
    """The text without its middle if it is longer than `most` characters, for a label."""
    if len(text) <= most:
        return text
    return f"{text[: most // 2]}…{text[len(text) - (most - 1) // 2 :]}"


def curve(
    records: Sequence[Record], key: str, places: Sequence[float | None] | None = None
) -> tuple[list[float], list[float]]:
    """Places and values of the records with a finite number under this key, and with a place.

    places: one for each record; None for their steps.
    """
    at = [record["step"] for record in records] if places is None else places
    values = [number(record, key) for record in records]
    points = [(x, y) for x, y in zip(at, values, strict=True) if x is not None and y is not None]
    return [x for x, _ in points], [y for _, y in points]


def smooth(values: Sequence[float] | npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Running mean over the last thirtieth of the run; (n,) numbers to (n,), float64.

    A window is the end of one block of the window's width and the beginning of the next, so that no
    sum holds a number from before the window, which could be far larger.
    """
    numbers = np.asarray(values, dtype=np.float64)
    count = len(numbers)
    width = max(1, count // 30)
    blocks = np.pad(numbers, (0, -count % width)).reshape(-1, width)
    with np.errstate(over="ignore"):
        to_here = np.cumsum(blocks, axis=1).ravel()  # from the beginning of the block
        from_here = np.cumsum(blocks[:, ::-1], axis=1)[:, ::-1].ravel()  # to its end
        sums = to_here[:count]
        begins = np.arange(count) - width + 1
        two = (begins > 0) & (begins % width != 0)
        sums[two] += from_here[begins[two]]
    return sums / np.minimum(np.arange(1, count + 1), width)
