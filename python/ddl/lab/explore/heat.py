"""Heat maps of coloured cells with their numbers, so that they are readable without colour."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache

import numpy as np
import numpy.typing as npt
from rich.cells import cell_len, set_cell_size
from rich.text import Text

from ddl.lab.analysis.heat_maps import COLOURS

from .words import shorten

SHADES = 32
LABEL = 14  # characters of a row's name
UNKNOWN = "·"
BRIGHT = 0.18  # relative luminance above which black text has more contrast (WCAG 2)


def heat(
    values: npt.NDArray[np.float64],
    rows: Sequence[str],
    columns: Sequence[str],
    written: Callable[[float], str],
    *,
    limits: tuple[float, float] | None = None,
) -> Text:
    """A heat map (rows, columns): NaN is a dot without colour.

    written: a number as text. limits: of the colours; None for the least and the largest value.
    """
    known = values[np.isfinite(values)]
    low, high = limits or ((float(known.min()), float(known.max())) if known.size else (0.0, 1.0))
    names = [shorten(name, LABEL) for name in rows]
    label = max(map(cell_len, names), default=0)
    texts = [[written(v) if np.isfinite(v) else UNKNOWN for v in row] for row in values]
    cell = cell_width(columns, [text for row in texts for text in row])
    text = Text(" " * label + "".join(_right(name, cell) for name in columns))
    for name, row, cells in zip(names, values, texts, strict=True):
        text.append("\n" + set_cell_size(name, label))
        for value, shown in zip(row, cells, strict=True):
            share = (value - low) / (high - low) if high > low else 0.5
            text.append(_right(shown, cell), style=shade(share) if np.isfinite(value) else "")
    return text


def cell_width(columns: Sequence[str], cells: Sequence[str]) -> int:
    """Characters of a column, with a space between two."""
    return 1 + max(map(cell_len, (*columns, *cells)), default=0)


def _right(text: str, width: int) -> str:
    return " " * (width - cell_len(text)) + text


def shade(share: float) -> str:
    """The style of a cell whose value is this share of the way from the least to the largest."""
    return _shades()[round(min(1.0, max(0.0, share)) * (SHADES - 1))]


@lru_cache(maxsize=1)
def _shades() -> tuple[str, ...]:
    import matplotlib

    styles = []
    for red, green, blue, _ in matplotlib.colormaps[COLOURS](np.linspace(0, 1, SHADES)):
        light = 0.2126 * red**2.2 + 0.7152 * green**2.2 + 0.0722 * blue**2.2
        ink = "#000000" if light > BRIGHT else "#ffffff"
        styles.append(
            f"{ink} on #{round(255 * red):02x}{round(255 * green):02x}{round(255 * blue):02x}"
        )
    return tuple(styles)
