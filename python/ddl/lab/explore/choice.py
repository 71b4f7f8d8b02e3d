"""The reader's choice of what to show, and the lines that say so."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from rich.cells import cell_len
from rich.text import Text

from ddl.lab.config.comparing import Over
from ddl.lab.config.exploring import A_RUN

from .watching import Snapshot, View
from .words import shorten, wrap

NOTHING = f"There is no run yet; {A_RUN}."
READING = "The runs are being read."


class Choice(NamedTuple):
    """A snapshot of the runs, and the part of it to show.

    current: the run under the cursor; None without any. marked: the runs that are marked, all if
    none is. view: the number of the tab's view. log, smooth: how curves are drawn. over: their
    x-axis.
    """

    snapshot: Snapshot = Snapshot()
    current: View | None = None
    marked: tuple[View, ...] = ()
    view: int = 0
    log: bool = False
    smooth: bool = True
    over: Over = "steps"


def view_line(names: Sequence[str], chosen: int, width: int) -> Text:
    """The names of a tab's views, in as many lines as they need; the shown one is in brackets."""
    text, used = Text(), 0
    for number, name in enumerate(names):
        word = f"[{name}]" if number == chosen else f" {name} "
        if used and used + cell_len(word) > width:
            text.append("\n")
            used = 0
        text.append(word, style="bold" if number == chosen else "")
        used += cell_len(word)
    return text


def run_line(choice: Choice, width: int) -> Text:
    """Which run is shown."""
    view = choice.current
    if view is None:
        return Text(wrap(NOTHING, width))
    views = choice.snapshot.views
    place = f", {views.index(view) + 1} of {len(views)}, {view.state}"
    return Text(shorten(view.name, max(8, width - len(place))) + place, style="bold")


def problem_lines(view: View | None, width: int) -> str:
    """The sentences about files of a run that cannot be read."""
    return "\n".join(wrap(problem, width) for problem in (view.problems if view else ()))


def joined(*parts: Text | str) -> Text:
    """The parts that are not empty, each on lines of its own."""
    texts = [Text(part) if isinstance(part, str) else part for part in parts]
    return Text("\n").join([text for text in texts if text.plain])
