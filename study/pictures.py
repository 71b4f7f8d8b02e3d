"""The pictures of docs/results.md, made from the committed records; others have their looks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ddl.files import atomic_file
from ddl.lab.analysis.student import interval
from ddl.lab.train.plots import COLOURS, DASHES, MARKERS

from .records import Trained

Variants = Mapping[str, Mapping[int, Trained]]
BASELINE = "additive"
RECORDS = "Description"  # the PNG's field for the digest of the records


def spelled(name: str) -> str:
    """The name of a variant as readers know it: that of the residual, if there is one of it."""
    return f"ddl-{name}" if name.startswith(("cc", "tc")) else name


def curves(variants: Variants, path: Path, digest: str) -> None:
    """Validation losses over training, and their differences from the baseline, seed by seed."""

    def draw(figure: Any) -> None:
        losses, differences = figure.subplots(1, 2)
        for number, (name, runs) in enumerate(variants.items()):
            steps, values = validation(runs.values())
            losses.plot(steps, values.mean(0), label=spelled(name), **look(number))
            if name == BASELINE:
                differences.axhline(0, color="black", lw=1)
                continue
            paired = [seed for seed in runs if seed in variants[BASELINE]]
            ours = validation([runs[seed] for seed in paired])[1]
            theirs = validation([variants[BASELINE][seed] for seed in paired])[1]
            found = [interval(list(column)) for column in (ours - theirs).T]
            mean = np.array([each.mean for each in found])
            half = np.array([each.high - each.mean for each in found])
            shift = 12 * (number - len(variants) / 2)  # steps, so that bars do not cover each other
            differences.errorbar(np.array(steps) + shift, mean, half, capsize=2, **look(number))
        losses.set(
            xlabel="step", ylabel="validation loss, nats per byte", title="Mean over the seeds"
        )
        differences.set(xlabel="step", title=f"Difference from {BASELINE}, with 95 % intervals")
        clean(losses, differences)
        figure.legend(loc="outside lower center", ncols=len(variants), frameon=False, fontsize=9)

    save(draw, path, (10, 4.4), digest)


def gates(variants: Variants, path: Path, digest: str) -> None:
    """β over training, of every sublayer, and its spread over the tokens in the end."""
    shown = with_rewrites(variants)

    def draw(figure: Any) -> None:
        rows = figure.subplots(2, len(shown), squeeze=False)
        for column, (name, runs) in enumerate(shown.items()):
            steps = [each["step"] for each in runs[0].record["training"]]
            mean = np.mean([[s["beta"] for s in r.record["training"]] for r in runs], axis=0)
            image = rows[0][column].imshow(mean.T, aspect="auto", vmin=0, vmax=2, cmap="viridis")
            label_steps(rows[0][column], steps)
            rows[0][column].set_title(spelled(name))
            counts = np.mean([r.record["depth"]["eigenvalue_counts"] for r in runs], axis=0)
            shares = counts / counts.sum(1, keepdims=True)
            extent = (-1, 1, len(shares) - 0.5, -0.5)
            below = rows[1][column].imshow(shares, aspect="auto", extent=extent, cmap="viridis")
            rows[1][column].set_xlabel("λ in the end")
        for row in rows:
            row[0].set_ylabel("sublayer")
        figure.colorbar(image, ax=list(rows[0]), label="mean β")
        figure.colorbar(below, ax=list(rows[1]), label="share of tokens")

    save(draw, path, (2.3 * len(shown) + 1.5, 5.4), digest)


def spectra(variants: Variants, path: Path, digest: str) -> None:
    """Singular values of the product of all rewrites, and the effective rank of the stream."""
    shown = with_rewrites(variants)

    def draw(figure: Any) -> None:
        values, ranks = figure.subplots(1, 2)
        for number, name in enumerate(variants):
            if name not in shown:
                continue
            low, median, high = np.mean(
                [run.record["depth"]["singular_values"] for run in shown[name]], axis=0
            )
            numbers = np.arange(1, len(median) + 1) + 0.08 * (number - len(variants) / 2)
            ends = (median - low, high - median)
            values.errorbar(
                numbers, median, ends, elinewidth=0.8, label=spelled(name), **look(number)
            )
            rank = np.mean([run.record["depth"]["effective_rank"] for run in shown[name]], axis=0)
            ranks.plot(range(len(rank)), rank, **look(number))
        values.set(
            xlabel="number, in falling order",
            ylabel="singular value",
            title="Product of all rewrites: median, 10th to 90th percentile",
            ylim=(0, 1.05),
        )
        ranks.set(
            xlabel="after sublayers", ylabel="effective rank", title="The stream's value channels"
        )
        clean(values, ranks)
        figure.legend(loc="outside lower center", ncols=len(shown), frameon=False, fontsize=9)

    save(draw, path, (10, 4.2), digest)


def survival(variants: Variants, path: Path, digest: str) -> None:
    """The share that is left of the embedding and of every write after each sublayer."""
    means = {
        name: np.array([r.record["depth"]["survival"] for r in runs], dtype=float).mean(0)
        for name, runs in with_rewrites(variants).items()
    }
    means = {name: mean for name, mean in means.items() if np.nanmin(mean) < 1}  # which erase
    low = np.floor(10 * min(np.nanmin(mean) for mean in means.values())) / 10

    def draw(figure: Any) -> None:
        (row,) = figure.subplots(1, len(means), squeeze=False)
        for axes, (name, mean) in zip(row, means.items(), strict=True):
            image = axes.imshow(mean, vmin=low, vmax=1, cmap="viridis")
            axes.set_title(spelled(name))
            axes.set_xlabel("after sublayer")
            ticks = range(0, len(mean), 2)
            axes.set_xticks(ticks, ["start", *(str(i - 1) for i in ticks[1:])], fontsize=8)
            axes.set_yticks(ticks, ["embedding", *(str(i - 1) for i in ticks[1:])], fontsize=8)
        row[0].set_ylabel("written by")
        figure.colorbar(image, ax=list(row), label="share that is left", shrink=0.8)

    save(draw, path, (2.3 * len(means) + 1.5, 3.0), digest)


def with_rewrites(variants: Variants) -> dict[str, list[Trained]]:
    """The runs of the variants that have recordings."""
    found = {
        name: [run for run in runs.values() if "depth" in run.record]
        for name, runs in variants.items()
    }
    return {name: runs for name, runs in found.items() if runs}


def validation(runs: Any) -> tuple[list[int], Any]:
    """Steps, and the validation losses (seeds, steps)."""
    rows = [run.record["validation"] for run in runs]
    return [step for step, _ in rows[0]], np.array([[loss for _, loss in row] for row in rows])


def look(number: int) -> dict[str, Any]:
    """Colour, marker and dashes of the variant with this number in ORDER, in every picture."""
    return {
        "color": COLOURS[number % len(COLOURS)],
        "marker": MARKERS[number],
        "linestyle": DASHES[number // len(COLOURS)],
        "markerfacecolor": "white",
        "lw": 1.3,
        "markersize": 5,
    }


def clean(*plots: Any) -> None:
    """Give axes a light grid and no frame."""
    for axes in plots:
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)


def label_steps(axes: Any, steps: Sequence[int]) -> None:
    """Label the x-axis with the first and the last step."""
    axes.set_xticks((0, len(steps) - 1), (steps[0], steps[-1]), fontsize=8)
    axes.set_xlabel("step")


def save(draw: Callable[[Any], None], path: Path, size: tuple[float, float], digest: str) -> None:
    """Draw a figure and write it, with the digest of the records that it shows."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure = pyplot.figure(figsize=size, dpi=130, layout="constrained")
    try:
        draw(figure)
        with atomic_file(path) as temporary:
            figure.savefig(temporary, format="png", metadata={RECORDS: f"records {digest}"})
    finally:
        pyplot.close(figure)
