"""The tab of curves: a quantity of the marked runs over training."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from rich.cells import cell_len
from rich.text import Text

from ddl.lab.analysis.cost import CAPTION, LABELS, per_step, places
from ddl.lab.config.comparing import Over
from ddl.lab.train.plots import COLOURS, TOP

from .chart import Line, draw
from .choice import NOTHING, Choice, joined, view_line
from .series import Array
from .watching import View
from .words import NONE, compact, shorten, wrap

LETTERS = "abcdefg"
# A terminal may be dark or light, so the first curve has its own colour for text and not black.
LOOKS = ("", *COLOURS[1:])
MOST = len(LETTERS)
NAME = 28  # characters of a run's name in the legend


class Quantity(NamedTuple):
    """Points to draw: of training, faintly, and of validation; None if there are none."""

    title: str
    training: str
    validation: str | None = None


QUANTITIES = (
    Quantity("loss", "loss", "validation_loss"),
    Quantity("perplexity", "perplexity", "validation_perplexity"),
    Quantity("bits/byte", "bits_per_byte", "validation_bits_per_byte"),
    Quantity("mean β", "mean_beta"),
    Quantity("grad norm", "grad_norm"),
    Quantity("lr", "lr"),
    Quantity("tokens/s", "tokens_per_second"),
    Quantity("mfu", "mfu"),
    Quantity("memory", "peak_memory"),
)


def views(choice: Choice) -> list[str]:
    return [quantity.title for quantity in QUANTITIES]


def page(choice: Choice, width: int, height: int) -> Text:
    """The curves and their legend."""
    quantity = QUANTITIES[choice.view]
    shown = choice.marked[:MOST]
    parts = [view_line(views(choice), choice.view, width)]
    if not shown:
        return joined(*parts, wrap(NOTHING, width))
    without = [view.name for view in shown if not _has(view, quantity)]
    shown_with = [view for view in shown if _has(view, quantity)]
    unplaced = [view.name for view in shown_with if _axis(view, choice.over) is None]
    shown_with = [view for view in shown_with if view.name not in unplaced]
    parts.append(_legend(shown_with, quantity, width))
    if len(choice.marked) > MOST:
        parts.append(Text(f"{MOST} of {len(choice.marked)} runs: mark others with space."))
    if without:
        parts.append(Text(shorten(f"Without: {', '.join(without)}", width)))
    if unplaced:
        parts.append(Text(shorten(f"Without {LABELS[choice.over]}: {', '.join(unplaced)}", width)))
    if choice.over != "steps":
        parts.append(Text(wrap(f"Over {LABELS[choice.over]}. {CAPTION}".replace("\n", " "), width)))
    used = sum(part.plain.count("\n") + 1 for part in parts if part.plain)
    lines = [
        line for view, look in _looks(shown_with) for line in _lines(view, quantity, look, choice)
    ]
    chart = draw(lines, width, height - used, log=choice.log, top=_top(shown_with, quantity))
    return joined(*parts, chart)


def _axis(view: View, over: Over) -> Callable[[Array], Array] | None:
    """From steps to places on the x-axis; None if a run's are not known."""
    if over == "steps":
        return lambda steps: steps
    if view.config is None:
        return None
    scale = per_step(view.config, over)
    if scale is not None:
        return lambda steps: steps * scale
    pairs = zip(view.run.records, places(view.run, over), strict=True)
    known = dict(sorted((r["step"], place) for r, place in pairs if place is not None))
    if not known:
        return None
    at, seconds = np.array(list(known), float), np.array(list(known.values()), float)
    return lambda steps: np.interp(steps, at, seconds)


def _has(view: View, quantity: Quantity) -> bool:
    return any(name in view.series for name in quantity[1:] if name is not None)


def _looks(shown: Sequence[View]) -> list[tuple[View, tuple[str, str]]]:
    return [(view, (LETTERS[i], LOOKS[i])) for i, view in enumerate(shown)]


def _lines(view: View, quantity: Quantity, look: tuple[str, str], choice: Choice) -> list[Line]:
    axis = _axis(view, choice.over)
    assert axis is not None  # it is shown
    training = view.series.of(quantity.training).at(axis)
    training = training.smoothed() if choice.smooth and quantity.validation else training
    if quantity.validation is None:
        return [Line(training, *look)]
    validation = view.series.of(quantity.validation).at(axis)
    alone = not len(validation.values)  # without a validation yet, the letters are on this curve
    return [Line(training, *look, faint=not alone), Line(validation, *look)]


def _top(shown: Sequence[View], quantity: Quantity) -> float | None:
    """Where the y-axis ends, because the first training losses are far higher; None for no end."""
    if quantity.validation is None:
        return None
    found = [view.series.of(quantity.validation).values for view in shown]
    highest = [float(values.max()) for values in found if len(values)]
    return TOP * max(highest) if highest and max(highest) > 0 else None


def _legend(shown: Sequence[View], quantity: Quantity, width: int) -> Text:
    """Letter, name and last value of each run, side by side where they fit."""
    text, used = Text(), 0
    for view, (letter, colour) in _looks(shown):
        entry = f"{letter} {shorten(view.name, NAME)} {_last(view, quantity)}"
        if used and used + 3 + cell_len(entry) > width:
            text.append("\n")
            used = 0
        elif used:
            text.append("   ")
            used += 3
        text.append(entry[:1], style=f"bold {colour}".strip()).append(entry[1:])
        used += cell_len(entry)
    return text


def _last(view: View, quantity: Quantity) -> str:
    """The last value: of validation, else of training."""
    for name in (quantity.validation, quantity.training):
        if name is not None and name in view.series:
            last = float(view.series.of(name).values[-1])
            return f"{last:#.4g}" if 1 <= abs(last) < 1000 else compact(last)
    return NONE
