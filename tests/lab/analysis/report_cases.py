"""Runs for reports: inspections and recordings with known numbers, and a page as its elements."""

from __future__ import annotations

import json
from collections.abc import Sequence
from html.parser import HTMLParser
from pathlib import Path
from typing import Any, NamedTuple

from ddl.recording import PER_CHANNEL, QUANTITIES
from ddl.recording.quantities import BINS
from tests.lab.analysis.cases import make_run

NASTY = '</script><img src=x onerror=alert(1)><b>&amp;%{x}"\u202e\x1b[31m\ud800 $\\alpha$ \u05d0'
SHOWN = '</script><img src=x onerror=alert(1)><b>&amp;%{x}"\ufffd\ufffd[31m? $\\alpha$ \u05d0'
VOID = {"meta", "link", "br", "img", "input"}


def write_inspection(
    run: Path,
    sublayers: int = 4,
    channels: int = 2,
    prefix: str = "trunk.residuals.",
    **changes: Any,
) -> Path:
    """inspection.json of a model whose numbers tell their place; sublayer i is in bin i."""
    size = sublayers + 1
    found: dict[str, Any] = {
        "text": "the held-out part of a text",
        "format": 1,
        "tokens": 10,
        "sublayers": [
            {
                "name": f"{prefix}{i}",
                "channel_norm": {"mean": [i + j / 10 for j in range(channels)]},
                "channel_norm_after": {"mean": [i + 1 + j / 10 for j in range(channels)]},
                "eigenvalue_counts": [10 * (b == i) for b in range(BINS)],
            }
            for i in range(sublayers)
        ],
        "coherence": [[1 / (1 + abs(i - j)) for j in range(sublayers)] for i in range(sublayers)],
        "survival": [
            [None if n < s else 1 / (1 + n - s) for n in range(size)] for s in range(size)
        ],
    }
    file = run / "inspect" / "inspection.json"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(found | changes), encoding="utf-8")
    return file


def write_recordings(run: Path, steps: Sequence[int] = (2, 4, 6), sublayers: int = 4) -> Path:
    """recordings.jsonl: the mean of quantity q in sublayer i at a step is step + i / 10 + 100 q."""
    records = [
        {
            "step": step,
            "sublayers": [
                {"name": f"trunk.residuals.{i}"}
                | {
                    name: {"mean": [0.0, 0.0] if name in PER_CHANNEL else step + i / 10 + 100 * q}
                    for q, name in enumerate(QUANTITIES)
                }
                for i in range(sublayers)
            ],
        }
        for step in steps
    ]
    file = run / "recordings.jsonl"
    file.write_text("".join(json.dumps(record) + "\n" for record in records))
    return file


def add_records(run: Path, *records: dict[str, Any]) -> None:
    """Append to metrics.jsonl."""
    with (run / "metrics.jsonl").open("a", encoding="utf-8") as file:
        file.writelines(json.dumps(record) + "\n" for record in records)


def three_runs(folder: Path) -> list[Path]:
    """An additive run, one with everything that a report shows, and one with recordings alone."""
    runs = [
        make_run(folder / "plain-s1", losses=[3.0, 2.5]),
        make_run(folder / "full-s1", "ddl-cc", losses=[2.9, 2.25]),
        make_run(folder / "half-s1", "ddl", losses=[2.8, 2.4], steps=8),
    ]
    write_inspection(runs[1])
    write_recordings(runs[1])
    write_recordings(runs[2])
    for run in runs[:2]:
        add_records(
            run,
            {"step": 3, "sample": f"early text of {run.name}"},
            {"step": 6, "sample": f"late text of {run.name}"},
        )
    return runs


class Element(NamedTuple):
    """An element of a page: its name, attributes, and the text in it and in what it holds."""

    tag: str
    attributes: dict[str, str | None]
    parts: list[str]

    @property
    def text(self) -> str:
        return " ".join("".join(self.parts).split())


class Page(HTMLParser):
    """A page as its elements, in order."""

    def __init__(self, file: Path) -> None:
        super().__init__()
        self.elements: list[Element] = []
        self._open: list[Element] = []
        self.feed(file.read_text(encoding="utf-8"))
        self.close()
        assert self._open == [], "every element is closed"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        element = Element(tag, dict(attrs), [])
        self.elements.append(element)
        if tag not in VOID:
            self._open.append(element)

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop().tag == tag

    def handle_data(self, data: str) -> None:
        for element in self._open:
            element.parts.append(data)

    def all(self, tag: str, **attributes: str) -> list[Element]:
        """The elements of this name with these attributes."""
        wanted = attributes.items()
        return [e for e in self.elements if e.tag == tag and wanted <= e.attributes.items()]

    def texts(self, tag: str) -> list[str]:
        return [element.text for element in self.all(tag)]

    def rows(self, table: int) -> list[list[str]]:
        """The cells of a table, row by row."""
        starts = [i for i, e in enumerate(self.elements) if e.tag == "table"]
        ends = [*starts[1:], len(self.elements)]
        cells: list[list[str]] = []
        for element in self.elements[starts[table] : ends[table]]:
            if element.tag == "tr":
                cells.append([])
            elif element.tag in ("th", "td"):
                cells[-1].append(element.text)
        return cells

    @property
    def charts(self) -> dict[str, Any]:
        (found,) = self.all("script", type="application/json")
        return json.loads("".join(found.parts))
