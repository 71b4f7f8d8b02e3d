"""Fixtures of the tests of `ddl prepare`."""

from __future__ import annotations

from pathlib import Path

import pytest

from ddl.lab.data import sources
from tests.support.prepare_cases import as_lines, documents, write_tokenizer


@pytest.fixture
def small_units(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cut sources into units of 4 KiB, so that small inputs have many."""
    monkeypatch.setattr(sources, "UNIT", 4096)


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer.json of byte pairs."""
    return write_tokenizer(tmp_path_factory.mktemp("tokenizer") / "tokenizer.json")


@pytest.fixture
def lines(tmp_path: Path) -> Path:
    """A file of 200 documents as JSON lines."""
    as_lines(tmp_path / "a.jsonl", documents(200))
    return tmp_path / "a.jsonl"
