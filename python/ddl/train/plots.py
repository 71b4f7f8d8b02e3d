"""Plots of training runs."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ddl.files import atomic_file

from .json_lines import Record

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
LARGEST = 1e300  # of a number that is drawn or compared: sums and ranges of these are floats
LONGEST = 72  # characters of a name
ROW = 0.19  # inches of a row of the legend


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
    looks = zip(
        itertools.cycle(COLOURS), itertools.cycle(MARKERS), itertools.cycle(_dashes()), strict=False
    )
    highest = 0.0
    for name, group, look in zip(names, groups.values(), looks, strict=False):
        for number, records in enumerate(group):
            highest = max(highest, _draw(axes, records, look, "" if number else name))
    if highest > 0:
        axes.set_ylim(top=1.2 * highest)
    axes.set(xlabel="step", ylabel="loss, nats per token", title="Validation (marked), training")
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    if names:
        _add_legend(figure, columns, rows)
    with atomic_file(path, argument=argument) as temporary:
        figure.savefig(temporary, format="png")
    pyplot.close(figure)


def _dashes() -> list[Any]:
    """A dash for each curve, which changes when the colours are used up."""
    return [dash for dash in DASHES for _ in COLOURS]


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
    """The name, as far as it is UTF-8, without its middle if it is too long for the figure.

    matplotlib hides labels that start with an underscore.
    """
    if len(name) > LONGEST:
        name = f"{name[: LONGEST // 2]}…{name[-LONGEST // 2 + 1 :]}"
    return name.encode("utf-8", "replace").decode().replace("_", "\u2009_", name.startswith("_"))


def curve(records: Sequence[Record], key: str) -> tuple[list[int], list[float]]:
    """Steps and values of the records with a finite number under this key."""
    values = [number(record, key) for record in records]
    points = [(r["step"], v) for r, v in zip(records, values, strict=True) if v is not None]
    return [step for step, _ in points], [value for _, value in points]


def number(record: Any, key: str) -> float | None:
    """A finite number of a record, of at most `LARGEST`; None if there is none, as for NaN."""
    value: Any = record.get(key) if isinstance(record, Mapping) else None
    plain = isinstance(value, float | int) and not isinstance(value, bool)
    return float(value) if plain and -LARGEST <= value <= LARGEST else None


def smooth(values: Sequence[float]) -> list[float]:
    """Running mean over the last thirtieth of the run, in time that grows with its length only.

    A window is the end of one block of its width and the beginning of the next, whose sums are
    known. Differences of sums over the whole run would lose every digit after a single spike.
    """
    width = max(1, len(values) // 30)
    means: list[float] = []
    before: list[float] = []  # of the block before: before[i] is the sum of its values from i on
    for start in range(0, len(values), width):
        block = values[start : start + width]
        sums = itertools.accumulate(block)
        if before:
            ends = [*before[1:], 0.0]
            means += [(end + here) / width for end, here in zip(ends, sums, strict=False)]
        else:
            means += [here / count for count, here in enumerate(sums, start=1)]
        before = list(itertools.accumulate(reversed(block)))[::-1]
    return means
