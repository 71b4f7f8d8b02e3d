"""The loss curves of a report, over steps, tokens, FLOPs or seconds."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

from ddl.lab.config.comparing import Over
from ddl.lab.train.json_lines import number
from ddl.lab.train.plots import COLOURS, TOP, curve, smooth

from ..cost import LABELS, per_step, places
from ..paired import variants_of
from ..runs import Run
from .charts import Chart, Figure, make_layout, rounded, thinned
from .text import chart_text

# In the order of train/plots.py: plotly.js's name and the character that the legend shows.
SYMBOLS = {
    "circle": "●",
    "square": "■",
    "triangle-up": "▲",
    "diamond": "◆",
    "triangle-down": "▼",
    "cross": "✚",
    "x": "✖",
    "triangle-left": "◀",
    "triangle-right": "▶",
    "star": "★",
    "pentagon": "⬟",
}
DASHES = ("solid", "dash", "dot", "dashdot")
MOST_POINTS = 600  # of a curve: a chart has about as many pixels
MOST_MARKERS = 16  # of a curve: more would hide the line


class Key(NamedTuple):
    """An entry of the legend: a variant and its look, numbers of colour and dash."""

    name: str
    runs: list[str]
    colour: int
    dash: int
    symbol: str


def legend(runs: Sequence[Run]) -> list[Key]:
    """An entry for each variant among the runs that have records."""
    looks = zip(
        itertools.cycle(range(len(COLOURS))),
        itertools.cycle(SYMBOLS),
        itertools.cycle(n for n in range(len(DASHES)) for _ in COLOURS),
        strict=False,
    )
    groups = variants_of([run for run in runs if run.records])
    return [
        Key(name, [run.name for run in group], colour, dash, symbol)
        for (name, group), (colour, symbol, dash) in zip(groups.items(), looks, strict=False)
    ]


def losses(runs: Sequence[Run], keys: Sequence[Key]) -> Chart | None:
    """Validation losses with markers and smoothed training losses; None if no run has any.

    The y-axis is cut above the validation losses, because the first training losses are far higher.
    Both of its ends are given: plotly.js forgets a single one when it draws again.
    """
    named = {run.name: run for run in runs}
    traces: list[Figure] = []
    drawn: list[tuple[Run, str]] = []  # run and quantity of each trace
    highest = 0.0
    for group, key in enumerate(keys):
        for name in key.runs:
            run = named[name]
            steps, values = curve(run.records, "validation_loss")
            highest = max([highest, *values])
            training, recorded = curve(run.records, "loss")
            traces += _curve(group, key, name, "training", training, smooth(recorded).tolist())
            traces += _curve(group, key, name, "validation", steps, values)
            drawn += [(run, "loss")] * bool(training) + [(run, "validation_loss")] * bool(steps)
    if not traces:
        return None
    y: Figure = {"title": {"text": "nats per token"}, "automargin": True}
    lowest = min(value for trace in traces for value in trace["y"])
    top = TOP * highest
    margin = 0.05 * (top - lowest)
    y |= {"range": rounded([lowest - margin, top])} if highest > lowest else {}
    x: Figure = {"title": {"text": "step"}, "rangemode": "tozero", "exponentformat": "SI"}
    layout = make_layout(420, xaxis=x, yaxis=y)
    figure = {"data": traces, "layout": layout, "over": [_axis(over, drawn) for over in LABELS]}
    return Chart("losses", "Losses over", figure, 420, tuple(LABELS.values()))


def _axis(over: Over, drawn: Sequence[tuple[Run, str]]) -> Figure:
    """An x-axis that the reader may choose.

    scales: for each trace, its steps times this number. x: its places, if they are measured; none
    where they are not known.
    """
    title = LABELS[over]
    if over != "seconds":
        return {"title": title, "scales": [per_step(run.options, over) for run, _ in drawn]}
    found = [_places(run, key, over) for run, key in drawn]
    return {"title": title, "x": [rounded(thinned(x, MOST_POINTS), 6) for x in found]}


def _places(run: Run, key: str, over: Over) -> list[float | None]:
    """The places of the points of a curve, None for one without; empty if none has any."""
    pairs = zip(run.records, places(run, over), strict=True)
    found = [place for record, place in pairs if number(record, key) is not None]
    return found if any(place is not None for place in found) else []


def _curve(
    group: int, key: Key, run: str, kind: str, steps: Sequence[float], values: Sequence[float]
) -> list[Figure]:
    """A trace, thin for training and with markers for validation; none without a point."""
    if not steps:
        return []
    marked = kind == "validation"
    colour = COLOURS[key.colour]
    trace: Figure = {
        "type": "scatter",
        "mode": "lines+markers" if marked else "lines",
        "name": chart_text(run),
        "legendgroup": str(group),
        "x": thinned(steps, MOST_POINTS),
        "y": rounded(thinned(values, MOST_POINTS), 6),
        "line": {"color": colour, "dash": DASHES[key.dash], "width": 2 if marked else 1},
        "opacity": 1 if marked else 0.5,
        "hovertemplate": f"%{{fullData.name}}<br>step %{{x:,}}<br>{kind} loss %{{y:.4f}}"
        "<extra></extra>",
    }
    if marked:
        trace["marker"] = {
            "color": colour,
            "symbol": key.symbol,
            "size": 8,
            "maxdisplayed": MOST_MARKERS,
        }
    return [trace]
