"""Fixtures of the tests of `ddl report`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from ddl.lab.config import ReportConfig
from tests.lab.analysis.report_cases import Page

Write = Callable[..., Page]


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Write:
    """Write a report without plotly.js, and return its page."""
    from ddl.lab.analysis.report import page

    monkeypatch.setattr(page, "get_plotlyjs", lambda: "/* plotly.js */")

    def write(*runs: Path, **options: object) -> Page:
        config = ReportConfig(runs, **{"out": tmp_path / "page.html"} | options)  # type: ignore[arg-type]
        page.write_report(config)
        return Page(config.out)

    return write
