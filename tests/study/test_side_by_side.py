"""Runs in processes side by side; and the sweeps follow from the records they are based on."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

from ddl.errors import InputError
from ddl.lab.config.stored import from_json
from ddl.lab.config.sweeps import read_sweep
from ddl.models import GPTConfig
from ddl.options import LAST_COMMIT
from study import cost, page, records, side_by_side, tables
from study.records import Record
from study.side_by_side import Job

SWEEPS = Path(side_by_side.__file__).parent


def made(name: str) -> Record:
    if name == "wrong":
        raise ValueError("it is wrong")
    return {"name": name, "loss": 1.5, "process": os.getpid()}


def job(name: str, out: Path) -> Job:
    return Job(name, out, partial(made, name))


def test_what_has_no_record_is_done_and_kept(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`later` can only be planned when `b` has its record."""
    out = tmp_path / "records" / "a.jsonl"
    records.keep(out, {"name": "before", "loss": 1.0})

    def plan() -> Iterable[Job]:
        names = ["before", "b", "wrong"] + ["later"] * ("b" in records.by_name(out))
        return [job(name, out) for name in names]

    assert side_by_side.run(plan, processes=2, seconds=300) == 1
    found = records.by_name(out)
    assert list(found) == ["b", "before", "later"]
    assert "process" not in found["before"]
    assert os.getpid() not in {found[name]["process"] for name in ("b", "later")}
    printed = capsys.readouterr().out
    assert "wrong failed: it is wrong" in printed
    assert "later: loss 1.5000; " in printed


def test_what_there_is_no_time_for_is_left(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "a.jsonl"
    assert side_by_side.run(lambda: [job("b", out)], processes=1, seconds=0) == 1
    assert not out.exists()
    assert "left: 1" in capsys.readouterr().out


@pytest.mark.exhaustive
def test_a_sweep(tmp_path: Path) -> None:
    sweep = tmp_path / "some.toml"
    sweep.write_text(
        f'preset = "tiny"\nout = "{tmp_path}/runs"\nseeds = [1, 2]\n'
        '[variants.cc]\nmodel.residual = "ddl-cc"\n'
        '[options]\ndata = "topics"\nsteps = 4\neval_every = 2\neval_batches = 1\ndevice = "cpu"\n'
    )
    out = tmp_path / "some.jsonl"
    jobs = side_by_side.of_sweep(sweep, out)
    assert side_by_side.run(lambda: jobs, processes=2, seconds=300) == 0
    found = records.by_name(out)
    assert list(found) == ["cc-s1", "cc-s2"]
    assert [step for step, _ in found["cc-s1"]["validation"]] == [2, 4]
    assert found["cc-s1"]["processor"] == records.processor(torch.device("cpu"))


@pytest.mark.parametrize("name", ["main", "depth", "equal-flops", "equal-seconds"])
def test_learning_rates_are_the_best_of_the_tuning(name: str) -> None:
    """And the models are those that were tuned, but for the sizes of the deeper ones."""
    tuned: dict[str, dict[float, float]] = {}
    for variant, runs in records.read("tuning").items():
        rate = runs[101].record["config"]["optim"]["lr"]
        tuned.setdefault(variant.rsplit("-lr", 1)[0], {})[rate] = runs[101].loss
    models = {
        run.variant.rsplit("-lr", 1)[0]: run.config.model
        for run in read_sweep(SWEEPS / "tuning.toml").runs
    }
    for run in read_sweep(SWEEPS / f"{name}.toml").runs:
        losses, model = tuned[run.variant], run.config.model
        assert run.config.optim.lr == min(losses, key=losses.__getitem__), run.variant
        sizes = {"num_layers": model.num_layers, "hidden_size": model.hidden_size}
        assert model == replace(models[run.variant], **(sizes if name == "depth" else {}))


def test_steps_of_equal_cost() -> None:
    main = {run.variant: run.config for run in read_sweep(SWEEPS / "main.toml").runs}
    base = main[page.BASELINE]
    for run in read_sweep(SWEEPS / "equal-flops.toml").runs:
        ratio = base.flops_per_step / main[run.variant].flops_per_step
        assert run.config.steps == round(base.steps * ratio), run.variant
    times = page.read_cost(records.FOLDER)
    assert set(times) == set(cost.TIMED)
    for run in read_sweep(SWEEPS / "equal-seconds.toml").runs:
        assert run.config.steps == round(base.steps / times[run.variant]), run.variant


@pytest.mark.parametrize("name", ["tuning", "main", "depth", "equal-flops", "equal-seconds"])
def test_records_are_of_the_sweeps_options(name: str) -> None:
    """Every run has its record, but for the rates of `mhc` that were left out. Options that are
    gone are refused."""
    runs = {run.name: run for run in read_sweep(SWEEPS / f"{name}.toml").runs}
    found = records.by_name(records.FOLDER / f"{name}.jsonl")
    left_out = {f"mhc-lr{rate}-s101" for rate in ("0.008", "0.016")} if name == "tuning" else set()
    assert set(runs) - set(found) == left_out
    for made, record in found.items():
        stored = json.dumps(record["config"]["model"])
        if made.startswith(tables.GONE):
            with pytest.raises(InputError, match=f"no longer be built; commit {LAST_COMMIT} is"):
                from_json(GPTConfig, stored)
            continue
        config = runs[made].config
        assert from_json(GPTConfig, stored) == config.model
        assert record["config"]["optim"]["lr"] == config.optim.lr
        assert (record["config"]["steps"], record["config"]["seed"]) == (config.steps, config.seed)
        assert record["processor"] == "NVIDIA H200"
