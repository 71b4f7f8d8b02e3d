"""Curves in a terminal, drawn by plotext in dots of Braille characters; a letter for each run."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import plotext
from matplotlib.colors import to_rgb
from matplotlib.ticker import MaxNLocator
from rich.text import Text

from .series import Array, Curve
from .words import compact

LEAST = (24, 5)  # characters of the smallest chart
LARGEST = 1e300
APART = 12  # characters between two letters on a curve, about
MOST = 10  # numbers at a logarithmic axis
DOTS = 2  # of a Braille character, from left to right


class Line(NamedTuple):
    """A curve, its letter and colour. faint: drawn dimly and without letters."""

    curve: Curve
    letter: str
    colour: str
    faint: bool = False


def draw(
    lines: Sequence[Line], width: int, height: int, *, log: bool = False, top: float | None = None
) -> Text:
    """Draw the lines into `width` × `height` characters, axes included.

    log: logarithmic y-axis, on which only positive values appear. top: values above it are cut off.
    """
    if width < LEAST[0] or height < LEAST[1]:
        return Text("The window is too small for curves.")
    drawn = [line._replace(curve=_drawable(line.curve, width, log, top)) for line in lines]
    drawn = [line for line in drawn if len(line.curve.values)]
    if not drawn:
        return Text("There is nothing to draw yet.")
    plotext.clear_figure()
    plotext.theme("clear")
    plotext.limit_size(False, False)
    plotext.plot_size(width, height)
    _set_axes(drawn, width, height, log)
    for line in sorted(drawn, key=lambda line: not line.faint):
        steps, values = line.curve
        colour: Any = "default"
        if line.colour:
            colour = tuple(round(255 * part) for part in to_rgb(line.colour))
        style = "dim" if line.faint else "default"
        plotext.plot(steps.tolist(), values.tolist(), marker="braille", color=colour, style=style)
        for at in [] if line.faint else _evenly_spaced(steps, width):
            plotext.text(line.letter, float(steps[at]), float(values[at]), color=colour)
    return Text.from_ansi(plotext.build().rstrip("\n"))


def _drawable(curve: Curve, width: int, log: bool, top: float | None) -> Curve:
    """The points that have a place on the axes, of many the lowest and highest of each column.

    On a logarithmic axis that of a value is its logarithm.
    """
    keep = np.isfinite(curve.values) & ((curve.values > 0) | (not log))
    if top is not None and (curve.values[keep] <= top).any():
        keep &= curve.values <= top
    steps, values = curve.steps[keep], np.clip(curve.values[keep], -LARGEST, LARGEST)
    values = np.log10(values) if log else values
    if len(values) > 2 * width * DOTS:
        columns = np.array_split(np.arange(len(values)), width * DOTS)
        ends = [(c[values[c].argmin()], c[values[c].argmax()]) for c in columns]
        kept = np.unique(np.array(ends))
        steps, values = steps[kept], values[kept]
    return Curve(steps, values)


def _set_axes(lines: Sequence[Line], width: int, height: int, log: bool) -> None:
    """Round numbers on both axes, about one in a dozen columns and in three rows."""
    x, y = (np.concatenate(arrays) for arrays in zip(*(line.curve for line in lines), strict=True))
    low, high = float(y.min()), float(y.max())
    if not high > low:
        rest = 0.02 if log else abs(low) * 0.05 or 1.0
        low, high = low - rest, high + rest
    plotext.ylim(low, high)
    marks = _log_ticks(low, high) if log else _ticks(low, high, height // 3)
    plotext.yticks(marks, [compact(10.0**mark if log else mark) for mark in marks])
    marks = _ticks(float(x.min()), float(x.max()), width // 12)
    plotext.xticks(marks, [compact(mark) for mark in marks])


def _ticks(low: float, high: float, most: int) -> list[float]:
    """Round numbers from low to high, about `most` of them."""
    if low == high:
        return [low]
    found = MaxNLocator(max(2, most), steps=[1, 2, 5, 10]).tick_values(low, high)
    return [float(mark) for mark in found if low <= mark <= high]


def _log_ticks(low: float, high: float) -> list[float]:
    """Logarithms of round numbers: powers of 10, or 2 and 5 times these, or any between."""
    powers = range(math.floor(low), math.ceil(high) + 1)
    for factors in ((1,), (1, 2, 5)):
        found = [power + math.log10(factor) for power in powers for factor in factors]
        found = [mark for mark in found if low <= mark <= high]
        if len(found) >= 3:
            return found[:: -(-len(found) // MOST)]
    return [math.log10(number) for number in _ticks(10.0**low, 10.0**high, 4)]


def _evenly_spaced(steps: Array, width: int) -> list[int]:
    """Points for a curve's letters: the last one, and others evenly over the steps."""
    places = np.linspace(steps[0], steps[-1], max(2, width // APART))
    return sorted({int(at) for at in np.searchsorted(steps, places).clip(0, len(steps) - 1)})
