"""Charts as plotly.js takes them, as JSON's values: heat maps, and what all charts share.

Only attributes that plotly.js 3 and 4 know are used, those of plotly 6 and 7.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from ddl.recording.quantities import ADDED, BINS, BOUNDS

from ..labels import labels, spread
from ..recordings import SCALARS, Row, Training
from .rewrites import Depth
from .text import chart_labels

Figure = dict[str, Any]

MOST_STEPS = 200  # columns of a heat map over training
GRID, TEXT = "#d9d9d9", "#222222"  # page.js has their counterparts on a dark page
FIRST = ("beta", "error", "write_norm")  # quantities that the choice begins with


class Chart(NamedTuple):
    """A chart. id: of its element. height: pixels. choices: quantities or x-axes; the first one is
    shown."""

    id: str
    title: str
    figure: Figure
    height: int
    choices: tuple[str, ...] = ()


def thinned(values: Sequence[Any], most: int) -> list[Any]:
    """At most this many of the values, evenly spread, with the first and the last."""
    return [values[i] for i in spread(len(values), most)]


def rounded(values: Sequence[float | None], digits: int = 4) -> Row:
    """Numbers with so many significant digits: others would only make the page larger."""
    return [None if value is None else float(f"{value:.{digits}g}") for value in values]


# --- heat maps ------------------------------------------------------------------------------------


def depth_charts(depth: Depth, prefix: str) -> list[Chart]:
    """Eigenvalues, write survival, coherence and channel norms over depth, as heat maps; those that
    the model has."""
    names = labels(depth.sublayers)
    rewrites = depth.eigenvalues is not None
    of, channels = (
        ("the directions", "value channels") if rewrites else ("what they add", "streams")
    )
    titled = {
        "Eigenvalues of the rewrites: share of the tokens": _eigenvalues(depth, names),
        "Write survival: share that is left": _survival(depth, names),
        f"Coherence of {of}: mean |cos|": _coherence(depth, names),
        f"Norms of the {channels}": _channels(depth, names),
    }
    return [
        Chart(f"{prefix}-{number}", title, figure, figure["layout"]["height"])
        for number, (title, figure) in enumerate(titled.items())
        if figure is not None
    ]


def _eigenvalues(depth: Depth, names: Sequence[str]) -> Figure | None:
    if depth.eigenvalues is None:
        return None
    figure = _heat_map(
        depth.eigenvalues,
        ([-1 + (i + 0.5) * 2 / BINS for i in range(BINS)], "λ: −1 reflects, 0 replaces, 1 keeps"),
        (chart_labels(names), "sublayer"),
        f"λ = %{{x:.3f}} ± {1 / BINS:g} in sublayer %{{y}}<br>%{{z:.2%}} of the tokens",
        tickformat=".0%",
    )
    figure["layout"]["xaxis"] |= {"type": "linear", "range": [-1, 1], "nticks": 5}
    figure["layout"]["shapes"] = _bounds()
    return figure


def _survival(depth: Depth, names: Sequence[str]) -> Figure | None:
    if depth.survival is None:
        return None
    return _heat_map(
        depth.survival,
        (chart_labels(["start", *names]), "after sublayer"),
        (chart_labels(["embedding", *names]), "written by"),
        "written by %{y}, after %{x}<br>%{z:.3f} is left",
        limits=(0, max(1.0, *(v for row in depth.survival for v in row if v is not None))),
    )


def _coherence(depth: Depth, names: Sequence[str]) -> Figure:
    return _heat_map(
        depth.coherence,
        (chart_labels(names), "sublayer"),
        (chart_labels(names), "sublayer"),
        "%{y} and %{x}<br>mean |cos| %{z:.3f}",
        limits=(0, 1),
    )


def _channels(depth: Depth, names: Sequence[str]) -> Figure:
    return _heat_map(
        depth.channels,
        ([str(j) for j in range(len(depth.channels[0]))], "channel"),
        (chart_labels([*names, "end"]), "before sublayer"),
        "channel %{x} before %{y}<br>mean norm %{z:.4g}",
    )


def training_chart(training: Training, id: str) -> Chart | None:
    """A quantity over depth and training, with a choice of quantities; None without any."""
    order = [q for q in FIRST if q in training.means]
    order += [q for q in training.means if q not in FIRST]
    if not order:
        return None
    maps = [[rounded(thinned(row, MOST_STEPS)) for row in training.means[q]] for q in order]
    figure = _heat_map(
        maps[0],
        ([f"{step}" for step in thinned(training.steps, MOST_STEPS)], "step"),
        (chart_labels(labels(training.sublayers)), "sublayer"),
        "sublayer %{y}, step %{x}<br>mean %{z:.4g}",
    )
    figure["choices"] = maps
    sentences = SCALARS if "beta" in order else SCALARS | ADDED
    choices = tuple(sentences[q] for q in order)
    return Chart(
        id, "Over training: means over tokens", figure, figure["layout"]["height"], choices
    )


def _heat_map(
    values: Sequence[Row],
    x: tuple[Sequence[Any], str],
    y: tuple[Sequence[Any], str],
    hover: str,
    *,
    limits: tuple[float, float] | None = None,
    tickformat: str = "",
) -> Figure:
    """A heat map whose first row is at the top. x, y: labels of the cells, and of the axis."""
    low, high = limits or (None, None)
    trace: Figure = {
        "type": "heatmap",
        "x": list(x[0]),
        "y": list(y[0]),
        "z": [rounded(row) for row in values],
        "zmin": low,
        "zmax": high,
        "colorscale": "Viridis",  # its lightness rises evenly, so that it can be read in grey, too
        "colorbar": {"thickness": 12, "outlinewidth": 0, "tickformat": tickformat},
        "hoverongaps": False,
        "hovertemplate": f"{hover}<extra></extra>",
    }
    axis: Figure = {"type": "category", "automargin": True, "showgrid": False, "ticks": "outside"}
    height = 210 + 14 * min(max(len(values), 6), 30)
    layout = make_layout(
        height,
        # Smaller: on a phone the names of two sublayers would touch.
        xaxis=axis | {"title": {"text": x[1], "standoff": 10}, "tickfont": {"size": 11}},
        yaxis=axis | {"title": {"text": y[1], "standoff": 12}, "autorange": "reversed"},
    )
    return {"data": [trace], "layout": layout}


def _bounds() -> list[Figure]:
    """Lines between the regimes of rewrites."""
    line = {"color": "#ffffff", "width": 1, "dash": "dot"}
    place = {"type": "line", "yref": "paper", "y0": 0, "y1": 1, "line": line}
    return [place | {"x0": bound, "x1": bound} for bound in BOUNDS]


def make_layout(height: int, *, xaxis: Figure, yaxis: Figure) -> Figure:
    """The layout of a chart of so many pixels, with more about its axes."""
    colours = {"gridcolor": GRID, "zerolinecolor": GRID, "linecolor": GRID, "tickcolor": GRID}
    return {
        "height": height,
        "autosize": True,
        "uirevision": "kept",  # a redrawn chart keeps its zoom
        "margin": {"l": 48, "r": 8, "t": 32, "b": 44},
        "font": {"family": "system-ui, sans-serif", "size": 12, "color": TEXT},
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        "modebar": {"bgcolor": "rgba(0,0,0,0)", "color": "#999999", "activecolor": "#666666"},
        "showlegend": False,
        "hovermode": "closest",
        "xaxis": colours | xaxis,
        "yaxis": colours | yaxis,
    }
