"""benchmarks/convert_pretrained.py trains in every way, and says where each one starts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.benchmarks.test_benchmarks import load

__all__ = ["load"]


@pytest.fixture
def script(load: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    script = load("convert_pretrained")
    monkeypatch.setattr(script.torch, "set_num_threads", lambda threads: None)
    return script


def test_every_way_is_recorded(script: Any, tmp_path: Path) -> None:
    """Annealed and E start where the additions are; converted at once does not."""
    quick = ["--quick", "--seeds", "2", "--pretrain", "8", "--anneal", "2", "3"]
    assert script.main([*quick, "--out", str(tmp_path)]) == 0
    (line,) = (tmp_path / "convert_pretrained.jsonl").read_text(encoding="utf-8").splitlines()
    record = json.loads(line)
    losses = record["losses"]
    assert len(losses) == 1 + 2 * 4
    assert record["config"]["anneal"] == [2, 3]
    assert "out" not in record["config"]
    for way, runs in losses.items():
        assert [run.keys() for run in runs] == [{"0", "4"}] * 2
        for run, before in zip(runs, losses["additions"], strict=True):
            start = run["0"] - before["0"]
            assert (abs(start) < 1e-3) == ("at once" not in way), way
            assert run["4"] != run["0"]
    table = (tmp_path / "convert_pretrained.md").read_text(encoding="utf-8")
    assert [way for way in losses if f"| {way} " not in table] == []


def test_quick_is_recorded_nowhere(script: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(script.record.jsonl, "append", pytest.fail)
    assert script.main(["--quick"]) == 0


def test_an_annealed_model_that_starts_elsewhere_is_no_result(
    script: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def at_once(model: Any, **options: Any) -> Any:
        return convert(model, value_channels=options.get("value_channels", 1))

    convert = script.convert
    monkeypatch.setattr(script, "convert", at_once)
    with pytest.raises(AssertionError, match=r"^m 1, annealed over 2 starts at .*, and the model"):
        script.main(["--quick", "--pretrain", "8"])
