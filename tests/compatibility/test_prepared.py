"""Directories of `ddl prepare` that an earlier version wrote load, with the same documents."""

from __future__ import annotations

from pathlib import Path

import pytest

from ddl.lab import data
from tests.compatibility.cases import FORMATS, PREPARED
from tests.compatibility.write import write_prepared
from tests.support import ROOT
from tests.support.prepare_cases import read_documents


def test_a_prepared_directory_loads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The recorded ones, and the one that the next format will have."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "next").mkdir()
    write_prepared(tmp_path / "next")
    recorded = [path / PREPARED for path in FORMATS if (path / PREPARED).exists()]
    lines = (ROOT / "LICENSE-MIT").read_bytes().split(b"\n")
    for folder in (*recorded, tmp_path / "next" / PREPARED):
        corpus = data.load(folder)
        corpus.check(8, 256)
        documents = [t.tobytes() for part in read_documents(folder).values() for t in part]
        assert sorted(documents) == sorted([line for line in lines if line] * 2)
        assert len(list(folder.glob("train-*.bin"))) == 2
