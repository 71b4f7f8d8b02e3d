"""Draw the pictures of docs/mathematics.md and docs/performance.md.

    python -m docs.scripts.pictures          # after a change here, or of a record
    python -m docs.scripts.pictures --check  # says which picture is not current, exit status 1

SVG with text as text, so that the same numbers give the same file with the Matplotlib it names:
other releases place some parts elsewhere.
"""

from __future__ import annotations

import argparse
import io
import sys
from collections.abc import Callable
from pathlib import Path

import matplotlib
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from ddl import reference
from ddl.files import write_text
from ddl.lab.train.plots import COLOURS

from .performance import STREAMS, newest

DOCS = Path(__file__).parents[1]
BETAS = (0.0, 0.5, 1.0, 1.5, 2.0)


def rewrite(figure: Figure) -> None:
    """A stream of one channel and two features, rewritten with every β: it moves along k̂ alone."""
    axes = figure.subplots()
    state = torch.tensor([[0.35], [1.0]])
    direction, value = torch.tensor([2.0, 0.7]), torch.tensor([1.3])
    unit = direction / direction.norm()
    axes.axline((0, 0), tuple(unit), color="0.6", linewidth=1)
    axes.text(*(1.75 * unit + torch.tensor([0.0, 0.06])), "k̂", color="0.4")
    _arrow(axes, state, COLOURS[0])
    for beta in BETAS:
        new = reference.rewrite(state, direction, value, torch.tensor(beta), eps_k=1e-6)
        axes.plot(*new, "o", color=COLOURS[1], markersize=5)
        told = "X: β = 0" if beta == 0 else f"β = {beta:g}"
        axes.text(float(new[0]) - 0.02, float(new[1]) + 0.05, told, ha="right")
        if beta == 1:
            _arrow(axes, new, COLOURS[1])
    readout = (unit @ state).item()
    across = state.flatten() - readout * unit  # what no β changes
    for length, told in ((readout, "p = k̂ᵀX"), (value.item(), "v")):
        point = length * unit
        axes.plot(*torch.stack([point, point + across]).T, ":", color="0.6", linewidth=1)
        axes.plot(*point, "|", color="black", markersize=10)
        axes.text(float(point[0]) - 0.03, float(point[1]) - 0.14, told)
    axes.set(xlim=(-0.1, 2.4), ylim=(-0.1, 1.8), aspect="equal")
    axes.set(xlabel="feature 1", ylabel="feature 2")


def traffic(figure: Figure) -> None:
    """Elements of width d that cross memory for a token between two sublayers, by m."""
    axes = figure.subplots()
    channels = list(range(1, 17))
    for told, count, colour in (
        ("forward: (2m + 2) d", [2 * m + 2 for m in channels], COLOURS[0]),
        ("backward: (3m + 3) d", [3 * m + 3 for m in channels], COLOURS[1]),
    ):
        axes.plot(channels, count, color=colour, marker="o", markersize=3, label=told)
    axes.axhline(4, color="0.5", linestyle="--", label="an addition and a norm, forward: 4 d")
    axes.set(xlabel="value channels m", ylabel="elements per token, in d", ylim=(0, None))
    axes.legend(frameon=False)


def memory(figure: Figure) -> None:
    """Bytes kept for the backward, over the additive residual's, by anchor_every."""
    axes = figure.subplots()
    record = newest("memory")
    rows = [row for row in record["results"] if row["mode"] == "eager"]
    for stream, colour in zip(STREAMS[:3], COLOURS, strict=False):
        points = [
            (row["anchor_every"], row["saved_over_additive"])
            for row in rows
            if (row["residual"], row["value_channels"]) == stream
        ]
        label = "{}, m = {}".format(*stream)
        axes.plot(*zip(*points, strict=True), color=colour, marker="o", label=label)
    axes.axhline(1, color="0.5", linestyle="--", label="additive")
    axes.set_xscale("log", base=2)
    axes.set_xticks([1, 2, 4, 8, 16], ["1", "2", "4", "8", "16"])
    axes.set(xlabel="N: every N-th state is stored", ylabel="memory, over additive", ylim=(0, None))
    axes.legend(frameon=False)


def _arrow(axes: Axes, to: torch.Tensor, colour: str) -> None:
    style = {"arrowstyle": "->", "color": colour}
    axes.annotate("", xy=to.flatten().tolist(), xytext=(0, 0), arrowprops=style)


PICTURES: dict[str, Callable[[Figure], None]] = {
    "mathematics-rewrite.svg": rewrite,
    "mathematics-traffic.svg": traffic,
    "performance-memory.svg": memory,
}


def svg(draw: Callable[[Figure], None]) -> str:
    """The picture as SVG; the same for the same numbers and Matplotlib."""
    same = {"svg.fonttype": "none", "svg.hashsalt": "ddl"}
    with matplotlib.rc_context(same | {"axes.spines.top": False, "axes.spines.right": False}):
        figure = Figure(figsize=(6, 4), layout="constrained")
        draw(figure)
        out = io.StringIO()
        figure.savefig(out, format="svg", metadata={"Date": None})
    lines = (line.rstrip() for line in out.getvalue().splitlines())
    return "\n".join(lines) + "\n"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--check", action="store_true", help="write nothing; say what is stale")
    check, stale = parser.parse_args(arguments).check, False
    for name, draw in PICTURES.items():
        path, text = DOCS / name, svg(draw)
        if not path.exists() or path.read_text("utf-8") != text:
            stale = True
            if check:
                print(f"docs/{name} is not current: python -m docs.scripts.pictures")
            else:
                write_text(path, text)
    return int(check and stale)


if __name__ == "__main__":
    sys.exit(main())
