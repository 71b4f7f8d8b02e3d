"""Plots of training runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ddl.files import atomic_file

Record = dict[str, Any]


def plot_losses(runs: Mapping[str, Sequence[Record]], path: Path) -> None:
    """Plot each run's validation loss (dots) and smoothed training loss over the steps as a PNG.

    The y-axis is cut above the validation losses, because the first training losses are far higher.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4.2), dpi=150)
    highest = 0.0
    for number, (name, records) in enumerate(runs.items()):
        training, validation = _curve(records, "loss"), _curve(records, "validation_loss")
        colour = f"C{number}"
        axes.plot(training[0], _smooth(training[1]), color=colour, alpha=0.4)
        axes.plot(*validation, color=colour, marker="o", label=_label(name))
        highest = max(highest, *validation[1], 0.0)
    if highest > 0:
        axes.set_ylim(top=1.2 * highest)
    axes.set(xlabel="step", ylabel="loss, nats per token", title="Validation (dots), training")
    axes.grid(alpha=0.3)
    for text in axes.legend().get_texts():
        text.set_parse_math(False)  # a name may have $
    figure.tight_layout()
    with atomic_file(path) as temporary:
        figure.savefig(temporary, format="png")
    pyplot.close(figure)


def _label(name: str) -> str:
    """The name, as far as it is UTF-8; matplotlib hides labels that start with an underscore."""
    return name.encode("utf-8", "replace").decode().replace("_", "\u2009_", name.startswith("_"))


def _curve(records: Sequence[Record], key: str) -> tuple[list[int], list[float]]:
    points = [(r["step"], r[key]) for r in records if key in r]
    return [step for step, _ in points], [value for _, value in points]


def _smooth(values: list[float]) -> list[float]:
    """Running mean over the last thirtieth of the run."""
    width = max(1, len(values) // 30)
    windows = (values[max(0, i + 1 - width) : i + 1] for i in range(len(values)))
    return [sum(window) / len(window) for window in windows]
