"""benchmarks/streams.py describes and times every residual, and none that is wrong."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from ddl.models import GPT, flops_per_token
from ddl.models.streams.controls import ConvolvedStream
from tests.benchmarks.test_benchmarks import load as load

RESIDUALS = ("additive", "additive-conv", "mhc", "ddl-cc")


@pytest.fixture
def script(load: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    found = load("streams")
    monkeypatch.setattr(found, "RESIDUALS", RESIDUALS)
    return found


def run(script: Any, out: Path) -> tuple[int, dict[str, Any]]:
    options = ["--quick", "--threads", "1", "--rounds", "2", "--backend", "eager"]
    status = script.main([*options, "--out", str(out)])
    (line,) = (out / "streams.jsonl").read_text(encoding="utf-8").splitlines()
    return status, json.loads(line)


def test_every_residual_is_described_and_timed(script: Any, tmp_path: Path) -> None:
    status, record = run(script, tmp_path)
    assert status == 0
    assert [result["residual"] for result in record["results"]] == list(RESIDUALS)
    for result in record["results"]:
        args = type("args", (), record["config"])
        model = GPT(replace(script.backbone_of(args), residual=result["residual"]))
        assert result["parameters"] == model.num_parameters()
        assert result["flops"] == flops_per_token(model.config).total
        assert result["kept"] > 0
        assert result["red"] is None
        assert all(len(result[mode]["seconds"]) == 2 for mode in ("eager", "compiled"))
    assert record["results"][0]["eager"]["ratio"] == 1
    assert "| mhc " in (tmp_path / "streams.md").read_text(encoding="utf-8")


def test_a_wrong_stream_is_not_timed(
    script: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = ConvolvedStream.forward

    def wrong(self: ConvolvedStream, x: Tensor, *args: Any, **options: Any) -> Tensor:
        return 1.01 * right(self, x, *args, **options)

    monkeypatch.setattr(ConvolvedStream, "forward", wrong)
    status, record = run(script, tmp_path)
    results = {result["residual"]: result for result in record["results"]}
    assert status == 1
    assert results["additive-conv"]["red"].startswith("logits: rms error")
    assert "eager" not in results["additive-conv"]
    assert "eager" in results["mhc"]
    assert "additive-conv is red" in (tmp_path / "streams.md").read_text(encoding="utf-8")
