"""Progress bars."""

from __future__ import annotations

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TextColumn,
    TimeRemainingColumn,
)


def progress_bar(console: Console) -> Progress:
    """A progress bar with steps, recent mean loss, tokens per second and remaining time."""
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[loss]}"),
        TextColumn("{task.fields[speed]}"),
        TimeRemainingColumn(),
        console=console,
    )


def passing_bar(console: Console, *columns: ProgressColumn) -> Progress:
    """A progress bar that vanishes at the end, with further columns before the remaining time."""
    return Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        *columns,
        TimeRemainingColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,  # without a terminal, a bar would leave an empty line
    )
