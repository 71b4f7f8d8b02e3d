"""Tables for the terminal (through rich if it is installed) and for Markdown files."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field

from ddl.lab.output import escaped, make_console, unguarded


@dataclass
class Table:
    """Rows of text under column names; the first `labels` columns are words, the others numbers."""

    title: str
    columns: Sequence[str]
    labels: int = 1
    rows: list[list[str]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def add(self, *cells: str) -> None:
        assert len(cells) == len(self.columns), f"{len(cells)} cells, {len(self.columns)} columns"
        self.rows.append(list(cells))

    def markdown(self) -> str:
        """A Markdown table, aligned, so that it reads well as plain text too."""
        lines = [list(self.columns), *self.rows]
        widths = [max(len(line[i]) for line in lines) for i in range(len(self.columns))]

        def row(cells: Sequence[str]) -> str:
            padded = (
                cell.ljust(width) if i < self.labels else cell.rjust(width)
                for i, (cell, width) in enumerate(zip(cells, widths, strict=True))
            )
            return f"| {' | '.join(padded)} |"

        rule = "|".join(
            "-" * (width + 2) if i < self.labels else "-" * (width + 1) + ":"
            for i, width in enumerate(widths)
        )
        body = "\n".join([row(lines[0]), f"|{rule}|", *map(row, lines[1:])])
        notes = "".join(f"\n{note}\n" for note in self.notes)
        return f"### {self.title}\n\n{body}\n{notes}"

    def show(self) -> None:
        """Print to standard output: with rich in a terminal wide enough for it, else Markdown."""
        if not (unguarded(sys.stdout).isatty() and self._show_rich()):
            print(self.markdown(), flush=True)

    def _show_rich(self) -> bool:
        try:
            from rich import box, table
        except ModuleNotFoundError:
            return False
        rich = table.Table(title=self.title, title_justify="left", box=box.SIMPLE_HEAD)
        for i, column in enumerate(self.columns):
            rich.add_column(column, justify="left" if i < self.labels else "right", no_wrap=True)
        for row in self.rows:
            rich.add_row(*row)
        out = make_console()
        if out.measure(rich, options=out.options.update(width=1000)).maximum > out.width:
            return False  # rich would truncate numbers
        out.print(rich, *self.notes, sep="\n", highlight=False)
        return True


def progress(text: str) -> None:
    """One line on standard error that the next one overwrites; nothing if it is no terminal."""
    terminal = unguarded(sys.stderr)
    if terminal.isatty():
        print(f"\r\x1b[K{escaped(text)}", end="", file=terminal, flush=True)
