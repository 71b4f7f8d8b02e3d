"""The documentation stays short: all of it, README, and the five pages that a newcomer reads."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.support import ROOT

README = ROOT / "README.md"
DOCS = ROOT / "docs"


def words(*pages: Path) -> int:
    return sum(len(page.read_text(encoding="utf-8").split()) for page in pages)


def test_all_pages() -> None:
    assert words(README, *DOCS.rglob("*.md")) <= 33_000
    assert len(README.read_text(encoding="utf-8").splitlines()) <= 180


NEWCOMERS = re.search(
    r"Five pages for newcomers, in order: (.*?)\. ", README.read_text(encoding="utf-8"), re.DOTALL
)


@pytest.mark.parametrize("page", re.findall(r"\]\((.*?)\)", NEWCOMERS[1]) if NEWCOMERS else [])
def test_pages_for_newcomers(page: str) -> None:
    assert words(ROOT / page) <= 900
