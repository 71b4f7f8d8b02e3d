"""Over widths and depths, which sizes stay as docs/transfer.md derives? Records, table, picture.

`python -m study.transfer` records what `python -m study.coordinates` measures, for two residuals.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

from ddl.lab.device import pick_device

from . import coordinates, records
from .pictures import clean, look, save
from .records import Record
from .side_by_side import Job

OUT = records.FOLDER / "transfer" / "sizes.jsonl"
RESIDUALS = ("additive", "ddl-cc")


def jobs() -> Iterator[Job]:
    """One for each residual, over widths and over depths, in both parameterizations."""
    for residual, over, scaled in product(RESIDUALS, coordinates.PLACES, (False, True)):
        work = partial(record_of, residual, over, scaled=scaled)
        yield Job(name_of(residual, over, scaled=scaled), OUT, work)


def name_of(residual: str, over: str, *, scaled: bool) -> str:
    return f"{residual}-{over}-{coordinates.parameterization(over, scaled=scaled)}"


def record_of(residual: str, over: str, *, scaled: bool) -> Record:
    """The sizes at every width or depth."""
    device = pick_device("auto", residual)
    places = coordinates.PLACES[over]
    return {
        "name": name_of(residual, over, scaled=scaled),
        "places": places,
        "sizes": coordinates.curves(residual, over, places, scaled=scaled, device=device),
        "processor": records.processor(device),
    }


def table(kept: Collection[Record]) -> str:
    """The picture, and the slopes beside the derived ones; a bold one is not near."""
    if not kept:
        return "Not measured yet."
    rows = [
        "![Sizes over width and depth](transfer-sizes.png)",
        "",
        "| | over | size | derived | standard | mup, completep |",
        "|---|---|---|---|---|---|",
    ]
    by_name = {record["name"]: record for record in kept}
    for residual, over in product(RESIDUALS, coordinates.PLACES):
        found = []
        for scaled in (False, True):
            record = by_name[name_of(residual, over, scaled=scaled)]
            given = residual, over, record["places"], record["sizes"]
            found.append(coordinates.slopes(*given, scaled=scaled))
        for plain, scaled_one in zip(*found, strict=True):
            cells = [_cell(slope) for slope in (plain, scaled_one)]
            start = f"| {residual} | {over} | {plain.quantity} | {plain.derived:+g} |"
            rows.append(f"{start} {' | '.join(cells)} |")
    end = (
        f"Slopes in log-log after {coordinates.STEPS} steps, {len(coordinates.SEEDS)} seeds; "
        f"**bold**: further than {coordinates.NEAR} from the derived one "
        f"({records.processors(kept)})."
    )
    return "\n".join([*rows, "", end])


def _cell(slope: coordinates.Slope) -> str:
    return f"{slope.found:+.2f}" if slope.near else f"**{slope.found:+.2f}**"


def picture(kept: Collection[Record], path: Path, digest: str) -> None:
    """Each size over that of the base and the derived power: a line that is flat is as derived."""
    by_name = {record["name"]: record for record in kept}

    def draw(figure: Any) -> None:
        grid = figure.subplots(len(RESIDUALS), 4, sharey=True)
        panels = product(RESIDUALS, coordinates.PLACES, (False, True))
        for axes, (residual, over, scaled) in zip(grid.flat, panels, strict=True):
            record = by_name[name_of(residual, over, scaled=scaled)]
            places, sizes = record["places"], record["sizes"]
            for number, quantity in enumerate(coordinates.DERIVED):
                derived = coordinates.derived_slope(over, quantity)
                if derived is None or quantity not in sizes[0]:
                    continue
                base = sizes[0][quantity]
                shown = [
                    row[quantity] / base / (place / places[0]) ** derived
                    for place, row in zip(places, sizes, strict=True)
                ]
                axes.plot(places, shown, label=quantity, **look(number))
            name = coordinates.parameterization(over, scaled=scaled)
            axes.set(xscale="log", yscale="log", title=f"{residual}, {name}")
            axes.set_xticks(places, [f"{place}" for place in places])
            axes.minorticks_off()
            clean(axes)
        for axes, over in zip(grid[-1], ("width", "width", "layers", "layers"), strict=True):
            axes.set_xlabel(over)
        for axes in grid[:, 0]:
            axes.set_ylabel("size over the derived one")
        lines, labels = grid[-1][0].get_legend_handles_labels()
        figure.legend(lines, labels, loc="outside lower center", ncols=len(labels), frameon=False)

    save(draw, path, (13, 6.5), digest)
