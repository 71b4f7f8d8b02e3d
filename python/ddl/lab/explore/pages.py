"""The tabs beside runs and curves: each is the names of its views and a function to text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from rich.console import Console
from rich.text import Text

from ddl.errors import InputError
from ddl.lab.analysis import tables
from ddl.lab.analysis.compare import Comparison, notes_on
from ddl.lab.analysis.options import options_of
from ddl.lab.analysis.paired import pair
from ddl.lab.config import TrainConfig
from ddl.lab.config.stored import options_by_name

from . import curves, inside
from .choice import NOTHING, Choice, joined, problem_lines, run_line, view_line
from .words import heading, rows, safe, safe_line, shorten, wrap

MOST_SAMPLES = 200
VALUE = 24  # characters of an option's value in a table of several runs


class Page(NamedTuple):
    """A tab. views: the names of its views. content: what it shows in so many columns and rows."""

    title: str
    views: Callable[[Choice], Sequence[str]]
    content: Callable[[Choice, int, int], Text]


def of_run(choice: Choice, views: Sequence[str], width: int, content: Text | str) -> Text:
    """Content about the current run, below its name and the names of the views."""
    top = view_line(views, choice.view, width) if len(views) > 1 else Text()
    problems = problem_lines(choice.current, width)
    return joined(run_line(choice, width), top, problems, content)


# --- inside ---------------------------------------------------------------------------------------


def _inside(choice: Choice, width: int, height: int) -> Text:
    run = choice.current
    content = Text()
    if run is not None:
        content = inside.content(choice.view, width, run.inspection, run.recordings)
    return of_run(choice, inside.VIEWS, width, content)


# --- comparison -----------------------------------------------------------------------------------

COMPARED = ("runs", "paired by seed")


def _compare(choice: Choice, width: int, height: int) -> Text:
    runs = [view.run for view in choice.marked if view.config is not None]
    top = view_line(COMPARED, choice.view, width)
    if len(runs) < 2:
        return joined(top, wrap("A comparison needs two runs, and here is no second one.", width))
    try:
        paired = pair(runs) if choice.view else None
    except InputError as error:
        return joined(top, wrap(safe(error), width))
    console = Console(width=width, record=False, color_system=None, legacy_windows=False)
    with console.capture() as captured:
        tables.show(Comparison(runs, notes_on(runs)), console, paired)
    lines = [line.rstrip() for line in captured.get().split("\n")]
    return joined(top, safe("\n".join(lines)).rstrip("\n"))


# --- samples --------------------------------------------------------------------------------------


def _samples(choice: Choice, width: int, height: int) -> Text:
    records = choice.current.run.records if choice.current is not None else ()
    samples = [(r["step"], r["sample"]) for r in records if isinstance(r.get("sample"), str)]
    if not samples:
        none = "No samples: `ddl train --sample-every N` writes them." if choice.current else ""
        return of_run(choice, (), width, wrap(none, width))
    blocks = [
        Text("\n").join([heading(f"step {step:,}"), Text(wrap(safe(text), width))])
        for step, text in reversed(samples[-MOST_SAMPLES:])
    ]
    return of_run(choice, (), width, Text("\n\n").join(blocks))


# --- configuration --------------------------------------------------------------------------------

CONFIGURED = ("options", "differences of the marked runs")


def _config(choice: Choice, width: int, height: int) -> Text:
    if choice.view:
        top = view_line(CONFIGURED, choice.view, width)
        return joined(top, _option_differences(choice, width))
    config = choice.current.config if choice.current is not None else None
    if config is None:
        return of_run(choice, CONFIGURED, width, "")
    usual, options = options_by_name(TrainConfig()), options_by_name(config)
    name = max(map(len, options))
    lines = [
        f"{'*' if value != usual.get(option) else ' '} {option:{name}}  {safe_line(value)}"
        for option, value in options.items()
    ]
    about = wrap("* differs from the default of `ddl train --help`, or was set by a preset.", width)
    return of_run(choice, CONFIGURED, width, "\n".join([*lines, "", about]))


def _option_differences(choice: Choice, width: int) -> str:
    configured = [view for view in choice.marked if view.config is not None]
    if not configured:
        return wrap(NOTHING, width)
    different = options_of([view.run for view in configured]).different
    if not different:
        return wrap("The marked runs have the same options.", width)
    head = ["option", *(shorten(view.name, VALUE) for view in configured)]
    lines = [[name, *(shorten(safe_line(v), VALUE) for v in values)] for name, values in different]
    return rows([head, *lines], labels=len(head))


PAGES = (
    Page("Curves", curves.views, curves.page),
    Page("Inside", lambda choice: inside.VIEWS, _inside),
    Page("Compare", lambda choice: COMPARED, _compare),
    Page("Samples", lambda choice: (), _samples),
    Page("Config", lambda choice: CONFIGURED, _config),
)
