"""benchmarks/memory.py counts what the formula predicts, and less with anchors."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.benchmarks.test_benchmarks import load

__all__ = ["load"]


@pytest.fixture
def results(load: Any, tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    memory = load("memory")
    monkeypatch.setattr(memory.torch, "set_num_threads", lambda threads: None)
    sizes = ["--channels", "4", "--anchors", "1", "2", "8", "--layers", "3"]
    assert memory.main(["--quick", *sizes, "--out", str(tmp_path)]) == 0
    return json.loads((tmp_path / "memory.jsonl").read_text(encoding="utf-8"))["results"]


def test_the_formula_holds_and_anchors_save_what_they_should(results: list[dict[str, Any]]) -> None:
    """The formula to the byte, for every residual and N; the peak is above what is kept.

    Six states of m·d numbers per token become three, and one.
    """
    assert len(results) == 1 + 3 + 4 * 3
    for result in results:
        assert result["saved"] == result["formula"], result
        assert result["peak"] > result["saved"], result
    tokens, d = 2 * 32, 64
    for residual, m in (("ddl", 1), ("ddl-cc", 4), ("ddl-tc", 4)):
        one, two, eight = (
            next(
                r["saved"]
                for r in results
                if (r["residual"], r["value_channels"], r["anchor_every"]) == (residual, m, every)
            )
            for every in (1, 2, 8)
        )
        assert one - two == 3 * 4 * tokens * d * m
        assert one - eight == 5 * 4 * tokens * d * m
