"""Heat maps of an inspection, over depth and over training."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ddl.files import atomic_file
from ddl.recording.quantities import BOUNDS
from ddl.text import one_line
from ddl.train.json_lines import number
from ddl.train.plots import shorten

from .inspection import Array, Inspection
from .labels import labels

__all__ = ["draw_depth", "draw_training"]

COLOURS = "viridis"  # its lightness rises evenly, so that it can be read in grey, too
MOST_LABELS = 24  # along an axis; of more sublayers only some get a label
LONGEST_LABEL = 40  # characters


def draw_depth(inspection: Inspection, path: Path) -> None:
    """Draw eigenvalues, write survival, coherence and channel norms over depth as a PNG."""
    names = labels(inspection.recording.sublayers)
    maps = (_eigenvalues, _survival, _coherence, _channels)

    def fill(axes: Any) -> None:
        for place, draw in zip(axes.flat, maps, strict=True):
            draw(place, inspection, names)

    tall = 3.0 + 0.16 * min(len(names) + 1, MOST_LABELS)
    _figure(path, (11, 2 * tall), (2, 2), fill)


def _eigenvalues(axes: Any, inspection: Inspection, names: Sequence[str]) -> None:
    counts = inspection.recording.eigenvalue_counts().double().numpy()
    shares = counts / counts.sum(1, keepdims=True)
    _heat(axes, shares, rows=names, label="share of tokens", extent=(-1, 1))
    for bound in BOUNDS:
        axes.axvline(bound, color="white", linewidth=0.6, linestyle=":")
    axes.set(title="What rewrites do: eigenvalue λ = 1 − β|k̂|²", ylabel="sublayer")
    axes.set_xticks((-1, -0.5, 0, 0.5, 1))
    axes.set_xlabel("λ:  −1 reflects,  0 replaces,  1 keeps")


def _survival(axes: Any, inspection: Inspection, names: Sequence[str]) -> None:
    least = np.floor(10 * _least(inspection.survival)) / 10
    rows, columns = ["embedding", *names], ["start", *names]
    label = "share that is left"
    _heat(axes, inspection.survival, rows=rows, columns=columns, label=label, limits=(least, 1))
    axes.set(title="Write survival", xlabel="after sublayer", ylabel="written by")


def _coherence(axes: Any, inspection: Inspection, names: Sequence[str]) -> None:
    values = inspection.coherence
    _heat(axes, values, rows=names, columns=names, label="mean |cos|", limits=(0, 1))
    axes.set(title="Coherence of directions", xlabel="sublayer", ylabel="sublayer")


def _channels(axes: Any, inspection: Inspection, names: Sequence[str]) -> None:
    before = inspection.recording.statistics("channel_norm").mean.numpy()
    last = inspection.recording.statistics("channel_norm_after").mean.numpy()[-1:]
    norms = np.concatenate([before, last])
    columns = [str(j) for j in range(norms.shape[1])]
    _heat(axes, norms, rows=[*names, "end"], columns=columns, label="mean norm")
    axes.set(title="Norm of the value channels", xlabel="value channel", ylabel="before")


def draw_training(records: Sequence[dict[str, Any]], path: Path) -> None:
    """Draw mean β, |v − p| and the norm of the writes over depth and training as a PNG.

    records: what `ddl train --record-every` has left, one for each recorded step. Raises ValueError
    if one has no sublayers, or others than the first.
    """
    sublayers = [_names(record) for record in records]
    if any(names != sublayers[0] for names in sublayers):
        raise ValueError("steps with different sublayers")
    names = labels(sublayers[0])
    steps = [str(record["step"]) for record in records]
    titles = {
        "beta": "Gate β",
        "error": "Error |v − p|",
        "write_norm": "Norm of the write",
    }

    def fill(axes: Any) -> None:
        for (quantity, title), place in zip(titles.items(), axes.flat, strict=True):
            means = [[number(s.get(quantity), "mean") for s in r["sublayers"]] for r in records]
            values = [[np.nan if mean is None else mean for mean in row] for row in means]
            _heat(
                place,
                np.array(values, dtype=float).T,
                rows=names,
                columns=steps,
                label="mean over tokens",
            )
            place.set(title=title, xlabel="step", ylabel="sublayer")

    _figure(path, (13, 3.0 + 0.16 * min(len(names), MOST_LABELS)), (1, 3), fill)


def _least(values: Array) -> float:
    """The least number; 0 if there is none, as for a model that never writes anything."""
    known = values[np.isfinite(values)]
    return float(known.min()) if known.size else 0.0


def _names(record: Mapping[str, Any]) -> list[str]:
    """The names of a record's sublayers, which are objects, at least one."""
    found = record.get("sublayers")
    if not isinstance(found, list) or not found or not all(isinstance(s, dict) for s in found):
        raise ValueError(f"step {record.get('step')} without sublayers")
    return [str(sublayer.get("name")) for sublayer in found]


def _figure(path: Path, size: tuple[float, float], grid: tuple[int, int], fill: Any) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(*grid, figsize=size, dpi=130, layout="constrained")
    try:
        fill(axes)
        with atomic_file(path) as temporary:
            figure.savefig(temporary, format="png")
    finally:
        pyplot.close(figure)


def _heat(
    axes: Any,
    values: Array,
    *,
    rows: Sequence[str],
    label: str,
    columns: Sequence[str] | None = None,
    limits: tuple[float, float] | None = None,
    extent: tuple[float, float] | None = None,
) -> None:
    """A heat map whose first row is at the top. extent: of the x-axis, instead of columns."""
    low, high = limits or (None, None)
    image = axes.imshow(
        values,
        aspect="auto",
        interpolation="nearest",
        cmap=COLOURS,
        vmin=low,
        vmax=high,
        extent=None if extent is None else (*extent, len(rows) - 0.5, -0.5),
    )
    _ticks(axes.set_yticks, rows)
    if columns is not None:
        turned = sum(map(len, columns)) > 24  # characters that fit side by side
        _ticks(axes.set_xticks, columns, rotation=90 if turned else 0)
    axes.figure.colorbar(image, ax=axes, label=label)


def _ticks(place: Any, names: Sequence[str], **options: Any) -> None:
    every = -(-len(names) // MOST_LABELS)
    shown = [shorten(one_line(name), LONGEST_LABEL) for name in names[::every]]
    # A dollar in a name begins no formula.
    place(range(0, len(names), every), shown, fontsize=8, parse_math=False, **options)
