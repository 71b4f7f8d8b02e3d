"""Write the tables and pictures of docs/results.md and README.md from the committed records.

    python -m study.page          # after study.side_by_side
    python -m study.page --check  # says what is not current, exit status 1

Text between `<!-- NAME: begin -->` and `<!-- NAME: end -->` is replaced; the rest stays.
"""

from __future__ import annotations

import argparse
import json
import struct
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from ddl.files import write_text
from docs.scripts.marked import fill

from . import again, cost, pictures, records, tables
from .pictures import BASELINE, Variants
from .records import Trained

ROOT = Path(__file__).parent.parent
PAGE, PROTOCOL = "docs/results.md", "study/README.md"
IN_PROTOCOL = {  # tables
    "audit", "smaller", "normalisation", "tuning", "devices", "provenance", "again",
}  # fmt: skip
# Those of the pictures, in the order of the legends.
PICTURED = (
    "additive", "additive-conv", "hc", "cc", "cc-none", "tc", "tc-separate", "tc-none",
)  # fmt: skip
# Each with the sweep that it shows. Runs as graphs on a GPU were not recorded over training.
PICTURES: dict[str, tuple[Callable[[Variants, Path, str], None], str]] = {
    "docs/results-curves.png": (pictures.curves, "main"),
    "docs/results-gates.png": (pictures.gates, "cpu"),
    "docs/results-survival.png": (pictures.survival, "main"),
    "docs/results-spectra.png": (pictures.spectra, "main"),
}


def texts(root: Path, folder: Path) -> Iterator[tuple[str, str]]:
    """The pages with their tables made anew from the records in `folder`, by file."""
    made = dict(made_tables(folder))
    for file, names in ((PAGE, set(made) - IN_PROTOCOL), (PROTOCOL, IN_PROTOCOL)):
        page = (root / file).read_text(encoding="utf-8")
        yield file, fill(page, {name: made[name] for name in names}, name=file)


def made_tables(folder: Path) -> Iterator[tuple[str, str]]:
    """The tables by name."""
    main, depth = compared(folder), records.read("depth", folder)
    yield "comparison", tables.comparison(main)
    yield "questions", tables.questions({"main": main, "depth": depth})
    yield "depth", tables.deep(depth)
    at_equal = [records.read(f"equal-{what}", folder) for what in ("flops", "seconds")]
    yield "equal", tables.equal(main, *at_equal, read_cost(folder))
    yield "audit", tables.audit(main)
    yield "tuning", tables.tuning(records.read("tuning", folder))
    kinds = {kind: records.read(f"normalisation-{kind}", folder) for kind in ("ours", "l2", "rms")}
    papers = {"eps-of-the-papers": kinds["ours"]["float32"]}
    yield "smaller", tables.smaller(records.read("smaller", folder) | papers)
    yield "normalisation", tables.normalisation(kinds)
    yield "devices", tables.devices(main, records.read("cpu", folder))
    yield "provenance", tables.provenance(list(records.every(folder)))
    repeated = (folder / again.OUT.name).read_text(encoding="utf-8")
    yield "again", tables.redrawn(json.loads(repeated))


def compared(folder: Path) -> dict[str, dict[int, Trained]]:
    """The runs of the comparison, of the seeds that every variant has been trained with."""
    found = records.read("main", folder)
    seeds = sorted(set.intersection(*(set(runs) for runs in found.values())))
    return {name: {seed: found[name][seed] for seed in seeds} for name in tables.ordered(found)}


def read_cost(folder: Path) -> dict[str, float]:
    """The time per step of each variant, over the baseline's."""
    record = json.loads((folder / cost.OUT.name).read_text(encoding="utf-8"))
    return cost.ratios(record, BASELINE)


def write(root: Path = ROOT, folder: Path = records.FOLDER) -> None:
    """Make the tables and the pictures anew."""
    for file, text in texts(root, folder):
        write_text(root / file, text)
    for file, (draw, sweep) in PICTURES.items():
        draw(pictured(folder, sweep), root / file, records.digest(sweep, folder=folder))


def pictured(folder: Path, sweep: str) -> Variants:
    """The runs that a picture shows."""
    if sweep != "main":
        return tables.ordered(records.read(sweep, folder))
    return {name: runs for name, runs in compared(folder).items() if name in PICTURED}


def stale(root: Path = ROOT, folder: Path = records.FOLDER) -> list[str]:
    """The files that do not show the records as they are."""
    old = [
        file
        for file, (_, sweep) in PICTURES.items()
        if made_of(root / file) != f"records {records.digest(sweep, folder=folder)}"
    ]
    pages = texts(root, folder)
    return old + [file for file, text in pages if text != (root / file).read_text(encoding="utf-8")]


def made_of(picture: Path) -> str | None:
    """The records that a PNG was made of, as its text chunk says; None without one."""
    if not picture.exists():
        return None
    data, at = picture.read_bytes(), 8
    while at < len(data):
        size, kind = struct.unpack(">I4s", data[at : at + 8])
        content = data[at + 8 : at + 8 + size]
        if kind in (b"tEXt", b"iTXt") and content.startswith(pictures.RECORDS.encode() + b"\0"):
            return content.rsplit(b"\0", 1)[1].decode()
        at += 12 + size
    return None


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--check", action="store_true", help="write nothing; say what is stale")
    if not parser.parse_args(arguments).check:
        write()
        return 0
    old = stale()
    print("".join(f"{file} is not current: python -m study.page\n" for file in old), end="")
    return bool(old)


if __name__ == "__main__":
    sys.exit(main())
