"""Runs that are watched while they train."""

from __future__ import annotations

import json
import os
import shutil
import time
from pathlib import Path

import numpy as np
import pytest

from ddl.files import alone_in
from ddl.lab.explore.watching import SILENT, Snapshot, View, Watch
from ddl.lab.train.json_lines import JsonLines
from tests.lab.analysis.cases import make_run, write_evaluation
from tests.lab.explore.conftest import append, copied


def only(snapshot: Snapshot) -> View:
    (view,) = snapshot.views
    return view


def silent(run: Path) -> Path:
    """Make the records of a run look old."""
    before = time.time() - SILENT - 1
    os.utime(run / "metrics.jsonl", (before, before))
    return run


def half_done(run: Path) -> Path:
    JsonLines(run / "metrics.jsonl").cut(2)
    shutil.rmtree(run / "checkpoints")  # the last step is saved
    return run


def test_states(run: Path) -> None:
    assert only(Watch([run]).poll()).state == "finished"
    half_done(run)
    assert only(Watch([run]).poll()).state == "training"  # it has just written
    silent(run)
    watch = Watch([run])
    assert only(watch.poll()).state == "stopped"
    with alone_in(run):
        assert only(watch.poll()).state == "stopped"  # a free lock is asked for once
        append(run, {"step": 3, "loss": 2.0})
        assert only(watch.poll()).state == "training"
        silent(run)
        assert only(Watch([run]).poll()).state == "training"  # a slow run
    assert only(Watch([run]).poll()).state == "stopped"
    append(run, {"step": 4, "diverged": "the loss is not finite"})
    assert only(watch.poll()).state == "diverged"
    (run / "config.json").write_text("{}")
    assert only(watch.poll()).state == "damaged"


@pytest.mark.parametrize("loss", [float("nan"), None])
def test_a_loss_that_is_no_number_has_diverged(tmp_path: Path, loss: float | None) -> None:
    run = make_run(tmp_path / "run", losses=[3.0, loss])
    view = only(Watch([run]).poll())
    assert view.state == "diverged"
    assert len(view.series.of("validation_loss").values) == 1


def test_a_run_that_does_not_change_is_not_made_again(run: Path) -> None:
    watch = Watch([run.parent])
    first = watch.poll()
    assert watch.poll() == first
    append(run, {"step": 6, "loss": 1.5})
    second = watch.poll()
    assert second != first
    assert only(second).series.of("loss").values[-1] == 1.5
    assert len(only(first).run.records) + 1 == len(only(second).run.records)


def test_a_run_that_goes_on_from_a_checkpoint(run: Path) -> None:
    watch = Watch([run])
    watch.poll()
    half_done(run)
    view = only(watch.poll())
    assert view.run.step == 2
    assert list(view.series.of("loss").steps) == [1, 2]


def test_records_out_of_order_are_drawn_in_order(run: Path) -> None:
    append(run, {"step": 2, "loss": 9.0}, {"step": 1, "loss": True}, {"step": 5, "loss": "x"})
    curve = only(Watch([run]).poll()).series.of("loss")
    assert np.all(np.diff(curve.steps) >= 0)
    assert np.isfinite(curve.values).all()
    assert 9.0 in curve.values


def test_folders_and_runs_in_a_sweeps_order(run: Path) -> None:
    for name in ("s10", "s2", "zz"):
        copied(run, run.parent / name)
    shutil.rmtree(run)
    (run.parent / "sweep.json").write_text(json.dumps({"runs": ["zz", "s10"]}))
    watch = Watch([run.parent, run.parent / "s2"])
    assert [view.name for view in watch.poll().views] == ["zz", "s10", "s2"]


def test_a_folder_without_runs(tmp_path: Path) -> None:
    assert Watch([tmp_path]).poll() == Snapshot(notes=(f"No run in {tmp_path} yet.",), read=True)


def test_evaluations_are_read_when_they_appear(run: Path) -> None:
    watch = Watch([run])
    assert only(watch.poll()).run.evaluations == ()
    write_evaluation(run, {None: {"piqa": 60.0}})
    assert only(watch.poll()).run.evaluations[0].scores == {"piqa": 60.0}
