"""Curves in a terminal: dots of Braille characters, and a letter for each run."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from rich.text import Text

from .series import Curve
from .words import compact

ACROSS, DOWN = 2, 4  # dots in a character
# The bit of each dot in a Braille character (Unicode, block 2800), by row and column.
BITS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))
LABEL = 9  # characters of the numbers at the y-axis
LEAST = (24, 5)  # characters of the smallest chart
LARGEST = 1e300
APART = 8  # characters between two letters on a curve

Cells = npt.NDArray[np.int64]


class Line(NamedTuple):
    """A curve, its letter and colour. faint: drawn dimly and without letters."""

    curve: Curve
    letter: str
    colour: str
    faint: bool = False


class Range(NamedTuple):
    """The numbers at the two ends of an axis; `low` < `high`."""

    low: float
    high: float

    def place(self, values: npt.NDArray[np.float64], dots: int) -> npt.NDArray[np.float64]:
        """Dots from the low end, of which there are `dots`."""
        return (values - self.low) / (self.high - self.low) * (dots - 1)


def draw(
    lines: Sequence[Line], width: int, height: int, *, log: bool = False, top: float | None = None
) -> Text:
    """Draw the lines into `width` × `height` characters, axes included.

    log: logarithmic y-axis, on which only positive values appear. top: values above it are cut off.
    """
    if width < LEAST[0] or height < LEAST[1]:
        return Text("The window is too small for curves.")
    lines = [line._replace(curve=_drawable(line.curve, log)) for line in lines]
    lines = [line for line in lines if len(line.curve.values)]
    if not lines:
        return Text("There is nothing to draw yet.")
    canvas = _Canvas(width - LABEL - 1, height - 2)
    x = _range([line.curve.steps for line in lines], margin=0.0)
    values = [np.log10(line.curve.values) if log else line.curve.values for line in lines]
    y = _range(values, margin=0.03, top=None if top is None else (math.log10(top) if log else top))
    for line, value in sorted(zip(lines, values, strict=True), key=lambda pair: not pair[0].faint):
        canvas.trace(
            x.place(line.curve.steps, canvas.columns * ACROSS),
            y.place(value, canvas.rows * DOWN),
            f"dim {line.colour}".strip() if line.faint else line.colour,
            "" if line.faint else line.letter,
        )
    return _with_axes(canvas, x, y, log)


def _drawable(curve: Curve, log: bool) -> Curve:
    """The points that have a place on the axis, of a size whose differences are floats."""
    keep = np.isfinite(curve.values) & ((curve.values > 0) | (not log))
    return Curve(curve.steps[keep], np.clip(curve.values[keep], -LARGEST, LARGEST))


def _range(
    arrays: Sequence[npt.NDArray[np.float64]], *, margin: float, top: float | None = None
) -> Range:
    low = min(float(array.min()) for array in arrays)
    high = max(float(array.max()) for array in arrays)
    high = high if top is None or top <= low else min(high, top)
    if not high > low:
        rest = abs(low) * 0.05 or 1.0
        return Range(low - rest, high + rest)
    return Range(low - margin * (high - low), high + margin * (high - low))


class _Canvas:
    """Characters made of dots, with a style each; letters cover dots."""

    def __init__(self, columns: int, rows: int) -> None:
        self.columns, self.rows = columns, rows
        self._bits: Cells = np.zeros((rows, columns), dtype=np.int64)
        self._styles = [[""] * columns for _ in range(rows)]
        self._letters: dict[tuple[int, int], str] = {}

    def trace(
        self, x: npt.NDArray[np.float64], y: npt.NDArray[np.float64], style: str, letter: str
    ) -> None:
        """Connect points, given in dots from the lower left corner, in the order of x."""
        last: tuple[int, float] | None = None
        shown = -APART
        for column, lowest, highest, first, final in _by_column(x, y):
            if last is not None:
                self._connect(last, (column, first), style)
            self._rise(column, lowest, highest, style)
            if (
                letter
                and column // ACROSS >= shown + APART
                and self._letter(column, final, letter, style)
            ):
                shown = column // ACROSS
            last = (column, final)
        if letter and last is not None:
            self._letter(*last, letter, style)

    def line(self, row: int) -> Text:
        """The characters of a row, from the top."""
        text = Text()
        for column in range(self.columns):
            bits = int(self._bits[row, column])
            dots = chr(0x2800 + bits) if bits else " "
            text.append(self._letters.get((row, column), dots), style=self._styles[row][column])
        return text

    def _connect(self, start: tuple[int, float], end: tuple[int, float], style: str) -> None:
        (x0, y0), (x1, y1) = start, end
        before = y0
        for column in range(x0, x1 + 1):
            here = y0 + (y1 - y0) * (column - x0) / max(1, x1 - x0)
            self._rise(column, min(before, here), max(before, here), style)
            before = here

    def _rise(self, column: int, low: float, high: float, style: str) -> None:
        """Set the dots of a column from `low` to `high`, as far as they are on the canvas."""
        for dot in range(max(0, round(low)), min(self.rows * DOWN - 1, round(high)) + 1):
            from_top = self.rows * DOWN - 1 - dot
            row, cell = from_top // DOWN, column // ACROSS
            self._bits[row, cell] |= BITS[from_top % DOWN][column % ACROSS]
            if (row, cell) not in self._letters:
                self._styles[row][cell] = style

    def _letter(self, column: int, y: float, letter: str, style: str) -> bool:
        """Write a letter at a point; return whether it is on the canvas."""
        from_top = self.rows * DOWN - 1 - round(y)
        if not 0 <= from_top < self.rows * DOWN:
            return False
        place = (from_top // DOWN, column // ACROSS)
        self._letters[place], self._styles[place[0]][place[1]] = letter, f"bold {style}".strip()
        return True


def _by_column(
    x: npt.NDArray[np.float64], y: npt.NDArray[np.float64]
) -> Iterator[tuple[int, float, float, float, float]]:
    """For each column of dots with points: the column, and their lowest, highest, first, last y."""
    columns = np.rint(x).astype(np.int64)
    begins = np.flatnonzero(np.diff(columns, prepend=-1))
    ends = np.append(begins[1:], len(columns)) - 1
    lowest, highest = np.minimum.reduceat(y, begins), np.maximum.reduceat(y, begins)
    numbers = zip(columns[begins], lowest, highest, y[begins], y[ends], strict=True)
    yield from ((int(c), float(lo), float(hi), float(a), float(b)) for c, lo, hi, a, b in numbers)


# --- axes -----------------------------------------------------------------------------------------


def _with_axes(canvas: _Canvas, x: Range, y: Range, log: bool) -> Text:
    marks = {}
    for tick in _log_ticks(y) if log else ticks(y, max(2, canvas.rows // 3)):
        dot = round(float(y.place(np.array(tick), canvas.rows * DOWN)))
        marks[(canvas.rows * DOWN - 1 - dot) // DOWN] = compact(
            10.0 ** min(tick, math.log10(LARGEST)) if log else tick
        )
    lines = []
    for row in range(canvas.rows):
        label = f"{marks[row]:>{LABEL - 1}} ┤" if row in marks else " " * LABEL + "│"
        lines.append(Text(label).append_text(canvas.line(row)))
    below, numbers = [*"─" * canvas.columns], [" "] * (LABEL + 1 + canvas.columns)
    for tick in ticks(x, max(2, canvas.columns // 12)):
        column = round(float(x.place(np.array(tick), canvas.columns * ACROSS))) // ACROSS
        label = compact(tick)
        begin = min(LABEL + 1 + column - len(label) // 2, len(numbers) - len(label))
        if not "".join(numbers[max(0, begin - 1) : begin + len(label) + 1]).strip():
            below[column] = "┬"
            numbers[begin : begin + len(label)] = label
    lines += [Text(" " * LABEL + "└" + "".join(below)), Text("".join(numbers).rstrip())]
    return Text("\n").join(lines)


def ticks(axis: Range, most: int) -> list[float]:
    """Round numbers on an axis, about `most` of them: 1, 2 or 5 times a power of 10."""
    raw = (axis.high - axis.low) / max(1, most)
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= raw * 0.999)
    first = math.ceil(axis.low / step - 1e-9)
    count = math.floor((axis.high - first * step) / step + 1e-9) + 1
    return [round((first + i) * step, 12 - math.floor(math.log10(step))) for i in range(count)]


def _log_ticks(axis: Range) -> list[float]:
    """Exponents of round numbers: powers of 10, 2 and 5 times these, or any between."""
    powers = range(math.floor(axis.low), math.ceil(axis.high) + 1)
    for factors in ((1,), (1, 2, 5)):
        found = [power + math.log10(factor) for power in powers for factor in factors]
        found = [tick for tick in found if axis.low <= tick <= axis.high]
        if len(found) >= 3:
            return found
    numbers = ticks(Range(10.0**axis.low, 10.0**axis.high), 4)
    return [math.log10(number) for number in numbers if number > 0]
