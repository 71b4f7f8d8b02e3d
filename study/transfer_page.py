"""Write the tables of study/transfer.md and the pictures of docs/transfer.md from their records.

python -m study.transfer_page          # after python -m study.transfer
python -m study.transfer_page --check  # says whether they are current, exit status 1
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ddl.models import GPTConfig
from docs.scripts.marked import write_tables

from . import records, sizes, transfer
from .page import made_of
from .pictures import clean, look, save
from .records import Record
from .transfer import DEPTH, WIDTH, Curve, Question

PAGE = Path(__file__).parent / "transfer.md"
DOCS = Path(__file__).parent.parent / "docs"
PICTURE, SIZES = DOCS / "transfer.png", DOCS / "transfer-sizes.png"


def panels() -> Iterator[tuple[str, Question, list[GPTConfig]]]:
    """Each residual and parameterization over sizes, with its name."""
    for residual in transfer.RESIDUALS:
        for question in (WIDTH, DEPTH):
            for name in ("standard", question.parameterization):
                models = question.models(residual, standard=name == "standard")
                yield f"{residual}, {name}", question, models


def size_of(model: GPTConfig, question: Question) -> str:
    """The name of a curve: d 64, or 4 layers."""
    return f"d {model.hidden_size}" if question is WIDTH else f"{model.num_layers} layers"


def rates_shown(kept: list[Record]) -> list[float]:
    """The learning rates at which a curve has a loss."""
    curves = {Curve.of(model) for _, _, models in panels() for model in models}
    return sorted({lr for curve in curves for lr in transfer.losses(curve, kept)})


def table(kept: list[Record]) -> str:
    """The losses by learning rate; the best, between others, is bold."""
    if not kept:
        return "Not trained yet."
    rates = rates_shown(kept)
    rows = [
        f"| | size | seeds | {' | '.join(f'{lr:g}' for lr in rates)} |",
        f"|---|---|---|{'---|' * len(rates)}",
    ]
    for name, question, models in panels():
        for model in models:
            curve = Curve.of(model)
            losses, best = transfer.losses(curve, kept), transfer.best(curve, kept)[1]
            cells = [_cell(losses.get(lr), bold=lr == best) for lr in rates]
            first = f"| {name} | {size_of(model, question)} | {len(curve.seeds)} |"
            rows.append(f"{first} {' | '.join(cells)} |")
    return "\n".join([*rows, "", _provenance(kept)])


def _cell(loss: float | None, *, bold: bool) -> str:
    if loss is None:
        return "–"
    return f"**{loss:.4f}**" if bold else f"{loss:.4f}"


def _provenance(kept: list[Record]) -> str:
    return (
        f"Validation loss, nats per byte, of {len(kept)} runs of {transfer.STEPS} steps with "
        f"{transfer.BATCH} × {transfer.BLOCK} bytes, {records.effort(kept)}."
    )


def picture(kept: list[Record], path: Path, digest: str) -> None:
    """Loss over the learning rate, a line for each size, with the best marked."""

    def draw(figure: Any) -> None:
        rates = rates_shown(kept)
        grid = figure.subplots(len(transfer.RESIDUALS), 4, sharex=True, sharey="row")
        for axes, (name, question, models) in zip(grid.flat, panels(), strict=True):
            for number, model in enumerate(models):
                curve = Curve.of(model)
                losses = dict(sorted(transfer.losses(curve, kept).items()))
                label = size_of(model, question)
                axes.plot([*losses], [*losses.values()], label=label, **look(number))
                if best := transfer.best(curve, kept)[1]:
                    full = look(number) | {"markerfacecolor": look(number)["color"]}
                    axes.plot([best], [losses[best]], **full)
            axes.set(xscale="log", title=name)
            axes.set_xticks(rates, [f"{lr:g}" for lr in rates], rotation=45)
            axes.minorticks_off()
            axes.legend(frameon=False, fontsize=8)
            clean(axes)
        for axes in grid[-1]:
            axes.set_xlabel("learning rate")
        for axes in grid[:, 0]:
            axes.set_ylabel("validation loss, nats per byte")

    save(draw, path, (13, 6.5), digest)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="change nothing")
    args = parser.parse_args(arguments)
    kept = list(records.by_name(transfer.OUT).values())
    measured = list(records.by_name(sizes.OUT).values())
    tables = {"transfer": table(kept), "sizes": sizes.table(measured)}
    stale = write_tables(PAGE, tables, command="study.transfer_page", check=args.check)
    drawn = (picture, kept, PICTURE, transfer.OUT), (sizes.picture, measured, SIZES, sizes.OUT)
    for draw, shown, path, source in drawn:
        digest = records.digest(source.stem, folder=source.parent)
        if not args.check and shown:
            draw(shown, path, digest)
        elif shown and made_of(path) != f"records {digest}":
            print(f"{path.name} is stale: run python -m study.transfer_page", file=sys.stderr)
            stale = 1
    return stale


if __name__ == "__main__":
    sys.exit(main())
