"""The benchmark of transformers' models runs end to end, and never times wrong results."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import pytest

from ddl.hf import delta_rule
from tests.support import ROOT


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module("accelerated")


def results(benchmark: Any, out: Path, status: int) -> list[dict[str, Any]]:
    assert benchmark.main(["--quick", "--out", str(out)]) == status
    (line,) = (out / "accelerated.jsonl").read_text(encoding="utf-8").splitlines()
    assert str(ROOT) not in line
    return json.loads(line)["results"]


def test_it_times_what_agrees(benchmark: Any, tmp_path: Path) -> None:
    found = results(benchmark, tmp_path, 0)
    assert [r["model"] for r in found] == ["Qwen3Next", "KimiLinear"]
    for r in found:
        assert r["red"] is None
        assert r["error"] < 1e-3
        for part in ("prefill", "step", "training"):
            assert len(r[part]["before_seconds"]) == len(r[part]["after_seconds"]) == 2


def test_it_does_not_time_what_differs(
    benchmark: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = delta_rule._compute

    def wrong(given: dict[str, Any]) -> Any:
        y, state = right(given)
        return 1.1 * y, state

    monkeypatch.setattr(delta_rule, "_compute", wrong)
    monkeypatch.setattr(delta_rule, "_compare", lambda *_: None)
    for r in results(benchmark, tmp_path, 1):
        assert "rms error" in r["red"]
        assert "prefill" not in r
