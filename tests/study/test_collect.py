"""The record of a run that the study keeps."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from ddl.lab.train import train
from ddl.lab.train.runs import RunDirectory
from study import collect
from tests.support.train_cases import quiet, short, stop_at


@pytest.mark.exhaustive
def test_finished_runs_are_collected_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs, out = tmp_path / "runs", tmp_path / "records" / "main.jsonl"
    cc = short(tmp_path, "ddl-cc", out=runs / "cc-s1", record_every=3, eval_batches=8)
    train(cc, quiet())
    train(replace(cc, model=replace(cc.model, residual="additive"), out=runs / "a-s1"), quiet())
    with monkeypatch.context() as patch:
        stop_at(4, patch)
        train(replace(cc, out=runs / "cc-s2"), quiet())
    collect.main([str(runs), str(out)])
    a, one = (json.loads(line) for line in out.read_text().splitlines())
    assert (a["name"], one["name"]) == ("a-s1", "cc-s1")
    assert "training" not in a
    losses = {
        r["step"]: r["validation_loss"]
        for r in RunDirectory(runs / "cc-s1").metrics.read()
        if "validation_loss" in r
    }
    assert one["validation"] == [[step, loss] for step, loss in losses.items()]
    assert one["loss"] == losses[6]
    assert one["config"]["model"]["residual"] == "ddl-cc"
    recorded = RunDirectory(runs / "cc-s1").recordings.read()
    assert [each["step"] for each in one["training"]] == [3, 6]
    expected = [sublayer["beta"]["mean"] for sublayer in recorded[1]["sublayers"]]
    assert one["training"][1]["beta"] == pytest.approx(expected, rel=1e-4)
    sublayers = len(expected)
    assert len(one["depth"]["coherence"]) == sublayers
    assert len(one["depth"]["survival"]) == sublayers + 1
    assert next(sum(counts) for counts in one["depth"]["eigenvalue_counts"]) > 0
    assert one["depth"]["alpha"] == [mean for mean, _ in one["depth"]["beta"]]  # erasing is tied
    as_it_is, *without, without_any = one["depth"]["without_erasing"]
    assert len(without) == sublayers
    assert len({as_it_is, *without, without_any}) == sublayers + 2

    before = out.read_text()
    train(replace(cc, out=runs / "cc-s2", resume="auto"), quiet())
    monkeypatch.setattr(collect, "inspect", lambda *_: pytest.fail("collected again"))
    with pytest.raises(pytest.fail.Exception):
        collect.main([str(runs), str(out)])  # the new one
    assert out.read_text() == before
