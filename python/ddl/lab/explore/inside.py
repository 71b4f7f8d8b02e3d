"""The tab of what the rewrites do: inspection.json of `ddl inspect`, and recordings.jsonl."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from rich.text import Text

from ddl.errors import InputError, first_line
from ddl.lab.analysis.inspection import read_summary
from ddl.lab.analysis.inspection_tables import depth_table, has_rewrites, sentences, three_digits
from ddl.lab.analysis.labels import labels, spread
from ddl.lab.train.json_lines import Record, number
from ddl.recording import REGIMES

from .heat import LABEL, cell_width, heat
from .words import compact, heading, rendered, rows, safe, safe_line, wrap

Summary = dict[str, Any]
Array = npt.NDArray[np.float64]
LEAST_WIDTH = 78  # of the table over depth, which scrolls sideways in a narrower terminal


class Recorded(NamedTuple):
    """Means over tokens of one recorded step, for each sublayer; NaN where nothing is known.

    A run without rewrites has means of some quantities only.
    """

    step: int
    names: tuple[str, ...]
    means: dict[str, tuple[float, ...]]


OVER_TRAINING = {"beta": "β", "error": "error", "write_norm": "write norm"}
TITLES = {
    "beta": "Gate β over training",
    "error": "Error |v − p| over training",
    "write_norm": "Norm of the write over training",
}
VIEWS = ("depth", *OVER_TRAINING.values(), "spectra", "survival", "coherence", "lens")


def recorded(record: Record) -> Recorded:
    """The part of a record of recordings.jsonl, which is far larger, that the heat maps need.

    Raises KeyError, TypeError or AttributeError for another record.
    """
    sublayers = record["sublayers"]
    means = {
        quantity: tuple(_mean(sublayer.get(quantity)) for sublayer in sublayers)
        for quantity in OVER_TRAINING
        if any(quantity in sublayer for sublayer in sublayers)
    }
    names = tuple(safe_line(sublayer["name"]) for sublayer in sublayers)
    return Recorded(record["step"], names, means)


def _mean(statistics: Any) -> float:
    mean = number(statistics, "mean")
    return float("nan") if mean is None else mean


def read_inspection(file: Path) -> Summary:
    """The summary in inspection.json; raises InputError if it cannot be shown."""
    try:
        summary = read_summary(file)
        for view in OF_INSPECTION.values():  # so that drawing cannot fail later
            view(summary, LEAST_WIDTH)
    except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        lacks = f"none with {error}" if isinstance(error, KeyError) else first_line(error)
        raise InputError.sentence(
            f"{file.name} must be an inspection of `ddl inspect`, got {lacks}"
        ) from error
    return summary


def content(
    which: int,
    width: int,
    inspection: Summary | None,
    recordings: Sequence[Recorded],
) -> Text:
    """One of VIEWS of a run; a sentence if the run has no such file."""
    name = VIEWS[which]
    quantity = next((q for q, title in OVER_TRAINING.items() if title == name), None)
    if quantity is None and inspection is not None:
        return OF_INSPECTION[name](inspection, width)
    if quantity is not None and recordings:
        if quantity not in recordings[-1].means:
            return _without(name, width)
        return _over_training(recordings, quantity, width)
    how = (
        "No inspection: `ddl inspect RUN` makes one, which appears here."
        if quantity is None
        else "No recordings: `ddl train --record-every N` writes them."
    )
    return Text(wrap(how, width))


def _without(what: str, width: int) -> Text:
    return Text(wrap(f"There is no {what} to show: this residual adds.", width))


def _over_training(recordings: Sequence[Recorded], quantity: str, width: int) -> Text:
    """Means over tokens, a row for each sublayer and a column for each recorded step that fits."""
    names = recordings[-1].names
    records = [r for r in recordings if r.names == names and quantity in r.means]
    values = np.array([record.means[quantity] for record in records], dtype=float).T
    steps = [compact(record.step) for record in records]
    cells = [three_digits(value) for value in values.flat]
    chosen = spread(len(records), (width - LABEL) // cell_width(steps, cells))
    title = heading(TITLES[quantity] + ", by sublayer and step")
    about = "Means over tokens; bright cells are large."
    if len(chosen) < len(records):
        about += f" {len(chosen)} of {len(records)} recorded steps."
    map_ = heat(values[:, chosen], labels(names), [steps[i] for i in chosen], three_digits)
    return Text("\n").join([title, map_, Text(wrap(about, width))])


def _depth(summary: Summary, width: int) -> Text:
    table = rendered(depth_table(summary), max(width, LEAST_WIDTH))
    about = wrap(safe(sentences(summary)), width)
    return Text(f"{safe(table)}\n\n{about}")


def _spectra(summary: Summary, width: int) -> Text:
    if not has_rewrites(summary):
        return _without("spectrum", width)
    names = _names(summary)
    shares = [[number(s["regimes"], regime) for regime in REGIMES] for s in summary["sublayers"]]
    bounds = [f"{low:g} to {high:g}".replace("-", "−") for low, high in REGIMES.values()]
    map_ = heat(np.array(shares, dtype=float), names, bounds, _percent, limits=(0.0, 1.0))
    title = heading("Eigenvalues λ = 1 − α|k̂|² of the rewrites: shares of the tokens")
    median = _table(summary, "singular_values", (3, None))[1]
    values = ", ".join(three_digits(value) for value in median)
    about = (
        f"Columns: {', '.join(REGIMES)}. All rewrites together shrink a state by at most the least"
        " of these singular values of their product (medians over tokens; all others are 1):"
        f" {values}."
    )
    return Text("\n").join([title, map_, Text(wrap(about, width))])


def _coherence(summary: Summary, width: int) -> Text:
    names = _names(summary)
    values = _table(summary, "coherence", (len(names), len(names)))
    map_ = heat(values, names, names, lambda value: f"{value:.2f}", limits=(0.0, 1.0))
    of = "the directions of two sublayers" if has_rewrites(summary) else "what two sublayers add"
    title = heading(f"Coherence: mean |cos| between {of}")
    return Text("\n").join([title, map_])


def _percent(value: float) -> str:
    return f"{value:.0%}"


def _names(summary: Summary) -> list[str]:
    return labels([safe_line(sublayer["name"]) for sublayer in summary["sublayers"]])


def _table(summary: Summary, name: str, shape: tuple[int, int | None]) -> Array:
    """A table of an inspection; ValueError if it has another shape. None: any number of columns."""
    values = np.array(summary[name], dtype=float)
    if values.ndim != 2 or values.shape != (shape[0], shape[1] or values.shape[-1]):
        raise ValueError(f"{name} of shape {values.shape}")
    return values


def _survival(summary: Summary, width: int) -> Text:
    if "survival" not in summary and not has_rewrites(summary):
        return Text(
            wrap("All writes survive whole: this residual adds, and erases nothing.", width)
        )
    names = _names(summary)
    values = _table(summary, "survival", (len(names) + 1, len(names) + 1))
    map_ = heat(
        values,
        ["embedding", *names],
        ["start", *names],
        _percent,
        limits=(0.0, max(1.0, float(np.nanmax(values, initial=1.0)))),
    )
    about = "Row: the source that wrote. Column: the sublayer after which this share is left."
    title = heading("Write survival: what is left of each write, by norm")
    return Text("\n").join([title, map_, Text(wrap(about, width))])


def _lens(summary: Summary, width: int) -> Text:
    lens = summary.get("lens")
    if not lens:
        return Text(wrap("No lens: `ddl inspect RUN --prompt TEXT` adds it.", width))
    names = ["embedding", *labels([str(row["after"]) for row in lens[1:]])]
    most = max(len(row["channels"]) for row in lens)
    channels = most if most > 1 else 0
    made = [["after", "all channels", *(f"{i} alone" for i in range(channels))]]
    for name, row in zip(names, lens, strict=True):
        words = [
            f"{safe_line(repr(token))} {float(p):.0%}"
            for token, p in zip(row["tokens"], row["probabilities"], strict=True)
        ]
        alone = [" ".join(safe_line(repr(t)) for t in tokens) for tokens in row["channels"]]
        made.append([safe_line(name), "  ".join(words), *alone[:channels]])
    title = heading("Stream lens: the next token if the stream ended there")
    return Text("\n").join([title, Text(rows(made, labels=len(made[0])))])


OF_INSPECTION: dict[str, Callable[[Summary, int], Text]] = {
    "depth": _depth,
    "spectra": _spectra,
    "survival": _survival,
    "coherence": _coherence,
    "lens": _lens,
}
