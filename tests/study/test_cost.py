"""The times of the study's variants are compared round by round."""

from __future__ import annotations

from pathlib import Path

import pytest

from study import cost


def test_a_round_that_is_slow_for_all_changes_nothing() -> None:
    seconds = {
        "base": {"eager": [1.0, 10.0, 1.0], "compiled": [2.0, 20.0, 2.0]},
        "other": {"eager": [3.0, 30.0, 3.0], "compiled": [1.5, 15.0, 1.4]},
    }
    assert cost.ratios({"seconds": seconds}, "base") == {"base": 1.0, "other": 1.5}


def test_every_variant_is_timed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sweep = tmp_path / "main.toml"
    text = cost.MAIN.read_text().replace("hidden_size = 128", "hidden_size = 16")
    sweep.write_text(text.replace('"study/data"', '"topics"').replace("size = 8", "size = 1"))
    monkeypatch.setattr(cost, "MAIN", sweep)
    monkeypatch.setattr(cost, "TIMED", ("additive", "tc-none"))
    monkeypatch.setattr(cost, "WAYS", ("eager",))  # a compilation takes a minute
    found = cost.measure(rounds=2)["seconds"]
    assert list(found) == ["additive", "tc-none"]
    for ways in found.values():
        assert list(ways) == ["eager"]
        assert len(ways["eager"]) == 2
        assert min(ways["eager"]) > 0
