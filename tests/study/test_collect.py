"""The record of a run that the study keeps."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from ddl.lab.train import train
from ddl.lab.train.runs import RunDirectory
from study import records
from study.collect import collect
from tests.support.train_cases import quiet, short, stop_at


@pytest.mark.exhaustive
def test_the_record_of_a_finished_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = tmp_path / "runs"
    cc = short(tmp_path, "ddl-cc", out=runs / "cc-s1", record_every=3, eval_batches=8)
    train(cc, quiet())
    train(replace(cc, model=replace(cc.model, residual="additive"), out=runs / "a-s1"), quiet())
    with monkeypatch.context() as patch:
        stop_at(4, patch)
        train(replace(cc, out=runs / "cc-s2"), quiet())
    assert collect(runs / "cc-s2") is None
    a, one = collect(runs / "a-s1"), collect(runs / "cc-s1")
    assert a is not None
    assert one is not None
    assert (a["name"], one["name"]) == ("a-s1", "cc-s1")
    assert one["processor"] == records.processor(torch.device("cpu"))
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
    as_it_is, *without, without_any = one["depth"]["without_erasing"]
    assert len(without) == sublayers
    assert len({as_it_is, *without, without_any}) == sublayers + 2
