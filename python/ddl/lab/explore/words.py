"""Text that a terminal can show: names, samples and options of runs come from anywhere."""

from __future__ import annotations

import io
import math
from unicodedata import category

from rich.cells import cell_len, chop_cells, set_cell_size
from rich.console import Console, RenderableType
from rich.text import Text

NONE = "–"
UNKNOWN = "\ufffd"
# Control, format (among them those that turn the direction of writing) and surrogate characters,
# line and paragraph separators.
HIDDEN = ("Cc", "Cf", "Cs", "Zl", "Zp")


def safe(text: object) -> str:
    """The text without what a terminal would obey; newlines stay, tabs become spaces."""
    shown = "".join(UNKNOWN if category(c) in HIDDEN and c not in "\n\t" else c for c in str(text))
    return shown.expandtabs(4)


def safe_line(text: object) -> str:
    """The text on one line."""
    return safe(text).replace("\n", UNKNOWN)


def shorten(text: str, width: int) -> str:
    """The text without its middle if it takes more than `width` cells."""
    if cell_len(text) <= width:
        return text
    end = text[-((width - 1) // 2) :] if width > 2 else ""
    return set_cell_size(text, max(0, width - 1 - cell_len(end))).rstrip() + "…" + end


def wrap(text: str, width: int) -> str:
    """The text with lines of at most `width` cells, broken between words where that is possible."""
    lines: list[str] = []
    for line in text.split("\n"):
        made = ""
        for number, word in enumerate(line.split(" ")):
            joined = f"{made} {word}" if number else word
            if made.strip() and cell_len(joined) > width:
                lines.append(made)
                joined = word
            *full, made = chop_cells(joined, width) or [""]
            lines += full
        lines.append(made)
    return "\n".join(lines)


def rendered(content: RenderableType, width: int) -> str:
    """A table as rich prints it, without colours, as wide as it has to be."""
    console = Console(width=width, file=io.StringIO(), color_system=None, legacy_windows=False)
    needed = console.measure(content, options=console.options.update(width=10**4)).maximum
    console.width = max(width, needed)
    with console.capture() as captured:
        console.print(content)
    return "\n".join(line.rstrip() for line in captured.get().split("\n")).strip("\n")


def rows(cells: list[list[str]], *, labels: int = 1) -> str:
    """Lines of cells in columns; all but the first `labels` columns stand on the right."""
    widths = [max(map(cell_len, column)) for column in zip(*cells, strict=True)]
    return "\n".join(
        "  ".join(
            cell + " " * (width - cell_len(cell))
            if i < labels
            else " " * (width - cell_len(cell)) + cell
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in cells
    )


def compact(number: float) -> str:
    """A number of an axis in few characters: 0.0003, 2.95, 14.2k."""
    size = abs(number)
    for unit, scale in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if scale * 10 <= size < 1e15 or (unit == "G" and scale <= size < 1e15):
            return f"{number / scale:.4g}{unit}"
    return f"{number:.4g}"


def figure(number: float | None) -> str:
    """A number of a table, with four digits behind the point where it is of that size."""
    if number is None:
        return NONE
    if not math.isfinite(number) or number == 0:
        return f"{number:g}"
    return f"{number:.4f}" if 1e-2 <= abs(number) < 1e4 else f"{number:.4g}"


def heading(text: str) -> Text:
    return Text(text, style="bold")
