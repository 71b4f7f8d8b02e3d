"""benchmarks/decode.py runs at a tiny size and never times wrong results."""

from __future__ import annotations

from typing import Any

import pytest

from ddl.lab.config import PUBLISHED
from ddl.models import Cache
from tests.benchmarks.test_benchmarks import ROUNDS, assert_describes_the_run, load, run

__all__ = ["load", "run"]


def test_decode(run: Any) -> None:
    record = run("decode", "--batches", "1", "3")
    assert_describes_the_run(record)
    results = {(r["residual"], r["interface"], r["batch"]): r for r in record["results"]}
    assert set(results) == {
        (residual, interface, batch)
        for residual in PUBLISHED
        for interface in ("ddl", "transformers")
        for batch in (1, 3)
    }
    steps = record["config"]["tokens"] - 1
    for (residual, interface, batch), result in results.items():
        assert result["red"] is None
        decode = sorted(result["decode_seconds"])
        assert len(decode) == len(result["prompt_seconds"]) == ROUNDS
        assert result["tokens_per_second"] == pytest.approx(batch * steps / decode[ROUNDS // 2])
        base = sorted(results["additive", interface, batch]["decode_seconds"])
        assert result["ratio"] == pytest.approx(base[ROUNDS // 2] / decode[ROUNDS // 2])
        own = sorted(results[residual, "ddl", batch]["decode_seconds"])
        assert result["of_own"] == pytest.approx(own[ROUNDS // 2] / decode[ROUNDS // 2])


def test_a_wrong_cache_is_not_timed(load, monkeypatch, capsys) -> None:
    decode = load("decode")
    right = Cache.extend
    monkeypatch.setattr(
        Cache, "extend", lambda cache, layer, k, v: right(cache, layer, k.flip(1), v)
    )
    monkeypatch.setattr(decode.torch, "set_num_threads", lambda threads: None)
    assert decode.main(["--quick", "--batches", "2", "--rounds", "1", "--hidden-size", "128"]) == 1
    shown = capsys.readouterr().out
    assert shown.count("RED, not timed") == len(PUBLISHED)
    assert "logits of a cached step: rms error" in shown
