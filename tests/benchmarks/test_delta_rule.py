"""The benchmark of the delta rule over time runs end to end, and never times wrong results."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import pytest

from ddl import functional
from tests.support import ROOT


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module("delta_rule")


def results(benchmark: Any, out: Path, status: int) -> list[dict[str, Any]]:
    assert benchmark.main(["--quick", "--out", str(out)]) == status
    (line,) = (out / "delta_rule.jsonl").read_text(encoding="utf-8").splitlines()
    assert str(ROOT) not in line
    record = json.loads(line)
    assert record["machine"]["simd"]
    return record["results"]


def test_it_times_what_agrees(benchmark: Any, tmp_path: Path) -> None:
    found = results(benchmark, tmp_path, 0)
    assert [r["decay"] for r in found] == ["head", "feature"]
    for r in found:
        assert r["red"] is None
        assert r["error"] < 1e-5
        for part in ("forward", "both", "step"):
            assert len(r[part]["ddl_seconds"]) == len(r[part]["transformers_seconds"]) == 2
            assert r[part]["ratio"] > 0
        # v − kᵀS (70 × 2 × 16) and two states (2 × 16 × 16) of each head
        assert r["kept_bytes"] == 4 * (70 * 2 * 16 + 2 * 2 * 16 * 16)


def test_it_does_not_time_what_differs(
    benchmark: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = functional.delta_rule

    def wrong(*arguments: Any, **options: Any) -> Any:
        found = right(*arguments, **options)
        return found._replace(y=1.001 * found.y)

    monkeypatch.setattr(functional, "delta_rule", wrong)
    for r in results(benchmark, tmp_path, 1):
        assert r["red"].startswith("y: rms error")
        assert "forward" not in r
