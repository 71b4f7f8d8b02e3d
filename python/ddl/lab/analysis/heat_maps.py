"""Heat maps of an inspection, over depth and over training."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ddl.files import atomic_file
from ddl.lab.train.plots import printed, without_glyph_warnings
from ddl.recording.quantities import BOUNDS

from .arrays import Array
from .inspection import Inspection
from .labels import labels
from .recordings import training_of

__all__ = ["draw_depth", "draw_training"]

PALE, DARK = "#c9c9d8", "#3b528b"  # bars
COLOURS = "viridis"  # its lightness rises evenly, so that it can be read in grey, too
MOST_LABELS = 24  # along an axis; of more sublayers only some get a label


def draw_depth(inspection: Inspection, path: Path) -> None:
    """Draw heat maps over depth as a PNG: eigenvalues, write survival, coherence, channel norms.

    A model without rewrites has no eigenvalues; of a single stream the norms and the shares are
    drawn as bars, and no survival.
    """
    names = labels(inspection.recording.sublayers)
    maps: tuple[Callable[[Any, Inspection, Sequence[str]], None], ...]
    if inspection.singular_values is not None:
        maps, grid = (_eigenvalues, _survival, _coherence, _channels), (2, 2)
    elif inspection.survival is not None:
        maps, grid = (_writes, _survival, _coherence, _channels), (2, 2)
    else:
        maps, grid = (_writes, _coherence), (1, 2)

    def fill(axes: Any) -> None:
        for place, draw in zip(axes.flat, maps, strict=True):
            draw(place, inspection, names)

    tall = 3.0 + 0.16 * min(len(names) + 1, MOST_LABELS)
    _figure(path, (11, grid[0] * tall), grid, fill)


def _writes(axes: Any, inspection: Inspection, names: Sequence[str]) -> None:
    """Norms of the stream and of what each sublayer adds to it, as bars from the top down."""
    recording, rows = inspection.recording, np.arange(len(names) + 1)
    before = recording.statistics("state_norm").mean.numpy()[:1]
    states = np.concatenate([before, recording.statistics("state_norm_after").mean.numpy()])
    writes = recording.statistics("write_norm").mean.numpy()
    axes.barh(rows, states, height=0.8, color=PALE)
    axes.barh(rows[1:], writes, height=0.4, color=DARK)
    for row in rows[:: _every(len(rows))]:
        axes.annotate(
            f"{inspection.shares[row]:.0%}".replace("-0%", "0%").replace("-", "−"),
            (states[row], row), (3, 0), textcoords="offset points", va="center", fontsize=7,
        )  # fmt: skip
    axes.set_xlim(0, 1.15 * np.nanmax(states))  # room for the shares beside the longest bar
    axes.set_ylim(len(names) + 0.6, -0.6)
    _ticks(axes.set_yticks, ["embedding", *names])
    axes.set(title="Norm of the write (dark) and of the stream after it", ylabel="sublayer")
    axes.set_xlabel("mean norm; beside it the share of the last state")


def _eigenvalues(axes: Any, inspection: Inspection, names: Sequence[str]) -> None:
    counts = inspection.recording.eigenvalue_counts().double().numpy()
    shares = counts / counts.sum(1, keepdims=True)
    _heat(axes, shares, rows=names, label="share of tokens", extent=(-1, 1))
    for bound in BOUNDS:
        axes.axvline(bound, color="white", linewidth=0.6, linestyle=":")
    axes.set(title="What rewrites do: eigenvalue λ = 1 − α|k̂|²", ylabel="sublayer")
    axes.set_xticks((-1, -0.5, 0, 0.5, 1))
    axes.set_xlabel("λ:  −1 reflects,  0 replaces,  1 keeps")


def _survival(axes: Any, inspection: Inspection, names: Sequence[str]) -> None:
    assert inspection.survival is not None
    least = np.floor(10 * _least(inspection.survival)) / 10
    rows, columns = ["embedding", *names], ["start", *names]
    label = "share that is left"
    most = max(1.0, float(np.nanmax(inspection.survival, initial=1.0)))  # streams may amplify
    limits = (least, most)
    _heat(axes, inspection.survival, rows=rows, columns=columns, label=label, limits=limits)
    axes.set(title="Write survival", xlabel="after sublayer", ylabel="written by")


def _coherence(axes: Any, inspection: Inspection, names: Sequence[str]) -> None:
    values = inspection.coherence
    _heat(axes, values, rows=names, columns=names, label="mean |cos|", limits=(0, 1))
    of = "directions" if inspection.singular_values is not None else "what sublayers add"
    axes.set(title=f"Coherence of {of}", xlabel="sublayer", ylabel="sublayer")


def _channels(axes: Any, inspection: Inspection, names: Sequence[str]) -> None:
    before = inspection.recording.statistics("channel_norm").mean.numpy()
    last = inspection.recording.statistics("channel_norm_after").mean.numpy()[-1:]
    norms = np.concatenate([before, last])
    columns = [str(j) for j in range(norms.shape[1])]
    _heat(axes, norms, rows=[*names, "end"], columns=columns, label="mean norm")
    channel = "value channel" if inspection.singular_values is not None else "stream"
    axes.set(title=f"Norm of the {channel}s", xlabel=channel, ylabel="before")


TRAINING = {
    "beta": "Gate β",
    "error": "Error |v − p|",
    "write_norm": "Norm of the write",
}
OF_ADDITIONS = {
    "write_norm": "Norm of the write",
    "state_norm_after": "Norm of the stream after it",
}


def draw_training(records: Sequence[dict[str, Any]], path: Path) -> None:
    """Draw mean β, |v − p| and the norm of the writes over depth and training as a PNG; of a model
    without rewrites the norms of the writes and of the stream.

    records: what `ddl train --record-every` has left, one for each recorded step. Raises ValueError
    if one has no sublayers, or others than the first.
    """
    training = training_of(records)
    names = labels(training.sublayers)
    steps = [str(step) for step in training.steps]
    unknown = [[None] * len(steps)] * len(names)
    titles = TRAINING if "beta" in records[0]["sublayers"][0] else OF_ADDITIONS

    def fill(axes: Any) -> None:
        for (quantity, title), place in zip(titles.items(), axes.flat, strict=True):
            means = np.array(training.means.get(quantity, unknown), dtype=float)
            _heat(place, means, rows=names, columns=steps, label="mean over tokens")
            place.set(title=title, xlabel="step", ylabel="sublayer")

    size = (13 * len(titles) / len(TRAINING), 3.0 + 0.16 * min(len(names), MOST_LABELS))
    _figure(path, size, (1, len(titles)), fill)


def _least(values: Array) -> float:
    """The least number; 0 if there is none, as for a model that never writes anything."""
    known = values[np.isfinite(values)]
    return float(known.min()) if known.size else 0.0


@without_glyph_warnings()
def _figure(path: Path, size: tuple[float, float], grid: tuple[int, int], fill: Any) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    spaced = ConstrainedLayoutEngine(w_pad=0.12)  # inches between a colour bar and other labels
    figure, axes = pyplot.subplots(*grid, figsize=size, dpi=130, layout=spaced)
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
    every = _every(len(names))
    shown = [printed(name) for name in names[::every]]  # a name may have $, too
    place(range(0, len(names), every), shown, fontsize=8, parse_math=False, **options)


def _every(count: int) -> int:
    """So many rows or columns have one label."""
    return -(-count // MOST_LABELS)
