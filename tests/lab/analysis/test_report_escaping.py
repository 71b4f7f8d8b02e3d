"""Names, samples and options are anybody's: a report shows them as text and lets nothing act."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("plotly", reason="needs the extra `report`")

from ddl.lab.analysis.report import page as page_module
from ddl.lab.analysis.report.page import write_report
from ddl.lab.analysis.report.text import BIDI_MARKS, chart_labels, chart_text, visible
from ddl.lab.config import ReportConfig
from tests.lab.analysis.cases import make_run
from tests.lab.analysis.conftest import Write
from tests.lab.analysis.report_cases import (
    NASTY,
    SHOWN,
    Page,
    add_records,
    three_runs,
    write_inspection,
    write_recordings,
)

NAME = "<b onclick=x>&lt;%{x}\u202e\x1b"  # a path holds neither a slash nor a surrogate of its own
NAME_SHOWN = "<b onclick=x>&lt;%{x}\ufffd\ufffd"


def nasty_run(folder: Path) -> Path:
    """A run that has markup wherever it can have text."""
    run = make_run(folder / NAME, "ddl", losses=[3.0, 2.5], data=NASTY.replace("\ud800", ""))
    add_records(run, {"step": 6, "sample": NASTY + "\n\tmore"})
    write_inspection(run, prefix=NASTY, text=NASTY)
    write_recordings(run)
    return run


def test_everything_is_shown_as_text(tmp_path: Path, write: Write) -> None:
    page = write(nasty_run(tmp_path), make_run(tmp_path / "other"))
    assert page.all("img") == page.all("b") == []
    assert not any(name.startswith("on") for e in page.elements for name in e.attributes)
    assert page.rows(0)[1][0] == NAME_SHOWN
    assert page.texts("title") == [f"Report: {NAME_SHOWN}, other"]
    assert page.texts("pre") == [f"{SHOWN} more"]
    assert {row[0]: row[1] for row in page.rows(2)}["data"] == SHOWN.replace("?", "")
    assert any(text.endswith(f"tokens of {SHOWN}.") for text in page.texts("p"))
    assert len(page.all("script")) == 3


def test_charts_get_escaped_text(tmp_path: Path, write: Write) -> None:
    """plotly.js reads tags and entities in names and labels; the hover's template is our own."""
    charts = write(nasty_run(tmp_path)).charts
    assert charts["losses"]["data"][0]["name"] == chart_text(NAME)
    assert chart_text(NAME) == "&lt;b onclick=x&gt;&amp;lt;%{x}\ufffd\ufffd"
    labels = charts["depth-0-0"]["data"][0]["y"]
    assert len(set(labels)) == 4
    for text in texts_of(charts):
        assert "<img" not in text
        assert set(re.findall(r"</?[a-z]+>", text)) <= {"<br>", "<extra>", "</extra>"}


def texts_of(values: object) -> Iterator[str]:
    if isinstance(values, dict):
        values = list(values.values())
    if isinstance(values, list):
        for value in values:
            yield from texts_of(value)
    elif isinstance(values, str):
        yield values


def test_no_text_ends_the_script_element_with_the_charts() -> None:
    texts = ["</script>", "<!--<script>", "\u2028"]
    written = page_module._json({"texts": texts})
    assert "<" not in written
    assert json.loads(written) == {"texts": texts}


def test_visible_text() -> None:
    assert visible(NASTY) == SHOWN
    assert visible(BIDI_MARKS) == "\ufffd" * len(BIDI_MARKS)
    assert visible("שלום\n\tعالم 👩\u200d👧") == "שלום\n\tعالم 👩\u200d👧"
    assert visible("\r\0\x85") == "\ufffd\ufffd\ufffd"


def test_labels_of_an_axis_are_short_and_different() -> None:
    assert chart_labels(["a\u202e", "a\u202d", "a"]) == ["a\ufffd", "a\ufffd (2)", "a"]
    long = chart_labels(["x" * 50 + end for end in "12"], most=9)
    assert long == ["xxxx…xxx1", "xxxx…xxx2"]


def test_nothing_is_fetched_and_no_other_script_runs(tmp_path: Path) -> None:
    out = tmp_path / "page.html"
    write_report(ReportConfig(tuple(three_runs(tmp_path)), out=out))
    page = Page(out)
    for element in page.elements:
        for name in ("src", "href", "action", "srcset", "data", "poster", "content", "style"):
            assert "//" not in (element.attributes.get(name) or ""), element
    (style,) = page.texts("style")
    assert "//" not in style
    assert "@import" not in style
    assert "url(" not in style
    (policy,) = page.all("meta", **{"http-equiv": "Content-Security-Policy"})
    rules = dict(rule.split(" ", 1) for rule in (policy.attributes["content"] or "").split("; "))
    assert rules["default-src"] == "'none'"
    sums = [
        hashlib.sha256("".join(script.parts).encode()).digest()
        for script in page.all("script")
        if "type" not in script.attributes
    ]
    expected = [f"'sha256-{base64.b64encode(found).decode()}'" for found in sums]
    assert rules["script-src"].split() == expected
    before = page.elements.index(policy)
    assert not any(e.tag in ("script", "style", "link") for e in page.elements[:before])
