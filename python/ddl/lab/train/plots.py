"""Plots of training runs."""

from __future__ import annotations

import itertools
import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

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
) -> None:
    """Plot each run's validation loss (markers) and smoothed training loss over the steps as a PNG.

    variants: the variant of each run; runs of one variant look alike and share an entry of the
    legend, which is below the curves. argument: names the path in an error message. The y-axis is
    cut above the validation losses, because the first training losses are far higher.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    groups: dict[str, list[Sequence[Record]]] = {}
    for name, records in runs.items():
        groups.setdefault((variants or {}).get(name, name), []).append(records)
    names = [_label(name) for name in groups]
    columns, rows = _legend_size(names)
    figure, axes = pyplot.subplots(figsize=(WIDTH, HEIGHT + ROW * rows), dpi=150)
    dashes = [dash for dash in DASHES for _ in COLOURS]  # another when the colours are used up
    looks = zip(*map(itertools.cycle, (COLOURS, MARKERS, dashes)), strict=False)
    highest = 0.0
    for name, group, look in zip(names, groups.values(), looks, strict=False):
        for i, records in enumerate(group):
            highest = max(highest, _draw(axes, records, look, "" if i else name))
    if highest > 0:
        axes.set_ylim(top=TOP * highest)
    axes.set(xlabel="step", ylabel="loss, nats per token", title="Validation (marked), training")
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    if names:
        _add_legend(figure, columns, rows)
    with atomic_file(path, argument=argument) as temporary:
        figure.savefig(temporary, format="png")
    pyplot.close(figure)


def _draw(axes: Axes, records: Sequence[Record], look: Sequence[Any], label: str) -> float:
    """Draw a run; return its highest validation loss."""
    colour, marker, dash = look
    training, validation = curve(records, "loss"), curve(records, "validation_loss")
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


def _add_legend(figure: Figure, columns: int, rows: int) -> None:
    """Put the legend below the axes, where it covers no curve, and make room for it."""
    height = figure.get_figheight()
    place: dict[str, Any] = {"loc": "lower center", "ncols": columns, "frameon": False}
    legend = figure.legend(**place, fontsize=8, handlelength=3.2, borderaxespad=0.2)
    for text in legend.get_texts():
        text.set_parse_math(False)  # a name may have $
    figure.tight_layout(rect=(0, (ROW * rows + 0.05) / height, 1, 1))


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


def curve(records: Sequence[Record], key: str) -> tuple[list[int], list[float]]:
    """Steps and values of the records with a finite number under this key."""
    values = [number(record, key) for record in records]
    points = [(r["step"], v) for r, v in zip(records, values, strict=True) if v is not None]
    return [step for step, _ in points], [value for _, value in points]


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
