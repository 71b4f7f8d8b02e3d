"""`ddl.lab.train.sweep`: what is skipped, resumed and reported, and what runs of a seed share."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import time
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from ddl.errors import InputError
from ddl.files import alone_in
from ddl.lab import data
from ddl.lab.config.sweeps import Sweep, parse_sweep
from ddl.lab.train import Step, Trainer
from ddl.lab.train.metrics import peak_memory
from ddl.lab.train.runs import RunDirectory
from ddl.lab.train.sweep import Pace, duration, reset_peak_memory, state_of, train_sweep
from tests.lab.train.crash import assert_same, curve, tensors
from tests.support.processes import Forked, command
from tests.support.train_cases import quiet, recorder

CPU = torch.device("cpu")
OPTIONS = {
    "model": {"block_size": 32, "hidden_size": 32},
    "steps": 4, "eval_every": 2, "log_every": 1, "eval_batches": 2, "device": "cpu",
}  # fmt: skip


def make(folder: Path, seeds: list[int], *residuals: str, **options: Any) -> Sweep:
    variants = {residual: {"model.residual": residual} for residual in residuals}
    values = {"preset": "tiny", "out": str(folder), "seeds": seeds, "variants": variants}
    return parse_sweep(values | {"options": OPTIONS | options})


def trained(
    monkeypatch: pytest.MonkeyPatch, act: Callable[[Trainer], Any] | None = None
) -> list[str]:
    """Names of the runs in the order of their steps, from now on; `act` may replace a step."""
    steps: list[str] = []
    original = Trainer.step

    def step(self: Trainer, *flags: Any) -> Any:
        steps.append(self.config.directory.name)
        made = act(self) if act is not None else None
        return original(self, *flags) if made is None else made

    monkeypatch.setattr(Trainer, "step", step)
    return steps


def test_what_is_finished_is_skipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sweep = make(tmp_path, [1, 2], "additive", "ddl")
    steps = trained(monkeypatch)
    assert train_sweep(sweep, console := recorder(), index=1) == (0, {})
    assert steps == ["ddl-s1"] * 4
    assert "Run 1 of 1: ddl-s1\n" in console.export_text()
    console = recorder()
    assert train_sweep(sweep, console) == (0, {})
    text = console.export_text()
    assert "1 run of 4 finished before" in text
    assert re.search(r"Run 2 of 4: additive-s1\n", text)
    assert re.search(r"Run 4 of 4: ddl-s2, about \d+ seconds? to the end of the sweep\n", text)
    names = ["additive-s1", "additive-s2", "ddl-s2"]
    assert steps[4:] == [name for name in names for _ in range(4)]
    console = recorder()
    assert train_sweep(sweep, console) == (0, {})
    assert console.export_text() == "4 runs of 4 finished before\n"
    assert len(steps) == 16
    listing = json.loads((tmp_path / "sweep.json").read_text())
    assert listing == {"runs": ["additive-s1", "additive-s2", "ddl-s1", "ddl-s2"]}


@pytest.mark.parametrize(
    "number",
    [
        signal.SIGUSR1,
        *(
            pytest.param(number, marks=pytest.mark.exhaustive)
            for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
        ),
    ],
)
def test_a_signal_stops_it_and_the_next_call_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    sweep, whole = (make(tmp_path / name, [1], "additive", "ddl", "ddl-cc") for name in "ab")
    stopping = [True]

    def stop(trainer: Trainer, *flags: Any) -> None:
        if stopping[0] and trainer.config.model.residual == "ddl" and trainer.steps_done == 1:
            os.kill(os.getpid(), number)

    steps = trained(monkeypatch, stop)
    console = recorder()
    assert train_sweep(sweep, console) == (128 + number, {})
    assert console.export_text().endswith(
        "The sweep has stopped; the same command goes on with it.\n"
    )
    assert steps == ["additive-s1"] * 4 + ["ddl-s1"] * 2
    assert [state_of(run) for run in sweep.runs] == [(4, True), (2, False), (0, False)]
    stopping[0] = False
    console = recorder()
    assert train_sweep(sweep, console) == (0, {})
    assert steps[6:] == ["ddl-s1"] * 2 + ["ddl-cc-s1"] * 4
    assert "Run 2 of 3: ddl-s1, goes on after step 2\n" in console.export_text()
    assert train_sweep(whole, quiet()) == (0, {})
    for ours, theirs in zip(sweep.runs, whole.runs, strict=True):
        assert curve(ours.config) == curve(theirs.config)
        assert_same(tensors(ours.config), tensors(theirs.config))


def test_a_stop_in_the_last_step_leaves_its_evaluation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sweep = make(tmp_path, [1], "additive")

    def stop(trainer: Trainer, *flags: Any) -> None:
        if trainer.steps_done == 3:
            os.kill(os.getpid(), signal.SIGTERM)

    trained(monkeypatch, stop)
    assert train_sweep(sweep, quiet()).status == 143
    assert state_of(sweep.runs[0]) == (4, False)
    assert train_sweep(sweep, quiet()) == (0, {})
    assert state_of(sweep.runs[0]) == (4, True)
    records = RunDirectory(sweep.runs[0].config.directory).metrics.read()
    assert records[-1]["step"] == 4
    assert "validation_loss" in records[-1]


def test_a_run_that_diverges_is_reported_and_the_others_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sweep = make(tmp_path, [1, 2], "additive", "ddl")

    def diverge(trainer: Trainer) -> Step | None:
        bad = trainer.config.directory.name == "additive-s2" and trainer.steps_done == 3
        return Step(torch.tensor(float("nan")), torch.tensor(1.0)) if bad else None

    steps = trained(monkeypatch, diverge)
    status, failed = train_sweep(sweep, console := recorder())
    assert status == 1
    assert list(failed) == ["additive-s2"]
    assert failed["additive-s2"].startswith("the loss is not finite at step 3 (loss nan, ")
    assert steps[-4:] == ["ddl-s2"] * 4
    assert "1 run of 4 failed: additive-s2\n" in console.export_text()


def test_other_options_than_the_runs_are_refused(tmp_path: Path) -> None:
    assert train_sweep(make(tmp_path, [1], "additive"), quiet()) == (0, {})
    longer = make(tmp_path, [1], "additive", "ddl", steps=5)
    status, failed = train_sweep(longer, quiet())
    expected = f"`steps` must be 4, as in {tmp_path}/additive-s1, to go on with it, got 5"
    expected += "; for another value start a new run, from these weights with `init_from`"
    expected += f" {tmp_path}/additive-s1"
    assert (status, failed) == (1, {"additive-s1": expected})
    assert state_of(longer.runs[1]).finished


def test_data_that_does_not_fit_is_reported(tmp_path: Path) -> None:
    sweep = make(tmp_path / "sweep", [1], "additive", data=str(tmp_path / "nothing"))
    status, failed = train_sweep(sweep, quiet())
    assert status == 1
    assert failed["additive-s1"].startswith("`data` must ")


def test_the_index_must_be_one_of_the_runs(tmp_path: Path) -> None:
    sweep = make(tmp_path / "sweep", [1], "additive", "ddl")
    with pytest.raises(
        InputError, match=r"^`index` must be from 0 to 1, the runs of the sweep, go"
    ):
        train_sweep(sweep, quiet(), index=2)
    assert not sweep.out.exists()


def test_an_out_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match=r"^`out` must be writable, got "):
        train_sweep(make(tmp_path / "file" / "x", [1], "additive"), quiet())


# --- several processes --------------------------------------------------------------------------


def test_a_run_that_another_process_has_is_left_to_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is refused before its model is built, and the others are trained."""
    sweep = make(tmp_path, [1], "additive", "ddl")
    steps = trained(monkeypatch)
    built = []
    make_trainer = Trainer.__init__
    counted = lambda *arguments: built.append(1) or make_trainer(*arguments)  # noqa: E731
    monkeypatch.setattr(Trainer, "__init__", counted)
    with alone_in(tmp_path / "additive-s1"):
        status, failed = train_sweep(sweep, quiet())
    assert status == 1
    assert failed["additive-s1"].startswith("`out` must be a directory of this process alone, got ")
    assert steps == ["ddl-s1"] * 4
    assert len(built) == 1
    assert train_sweep(sweep, quiet()) == (0, {})


@pytest.mark.exhaustive
def test_two_indices_at_once_and_the_same_twice(tmp_path: Path) -> None:
    file = tmp_path / "sweep.toml"
    file.write_text(
        f'preset = "tiny"\nout = "{tmp_path}/sweep"\nseeds = [1]\n'
        'variants.a.model.residual = "additive"\nvariants.b.model.residual = "ddl"\n'
        "[options]\nmodel = { block_size = 32, hidden_size = 32 }\n"
        'eval_batches = 1\nsave_every = 1\nsteps = 100000\ndevice = "cpu"\n'
    )
    index = count()

    def start(number: int) -> Forked:
        arguments = ("sweep", str(file), "--index", str(number))
        return Forked(1, tmp_path / f"said-{next(index)}", command(*arguments))

    processes = [start(0), start(1)]
    deadline = time.monotonic() + 120
    while not all((tmp_path / f"sweep/{name}-s1/metrics.jsonl").exists() for name in "ab"):
        assert time.monotonic() < deadline, [process.said() for process in processes]
        time.sleep(0.1)
    again = start(1)
    assert again.wait() == [1]
    assert "must be a directory of this process alone, got " in again.said()
    assert "Traceback" not in again.said()
    for process in processes:
        os.kill(process.pids[0], signal.SIGTERM)
    statuses = [process.wait()[0] for process in processes]
    assert statuses == [143, 143]
    assert all(RunDirectory(tmp_path / f"sweep/{name}-s1").steps() for name in "ab")


# --- what runs of a seed share ------------------------------------------------------------------


def test_runs_of_a_seed_share_backbone_and_batches(tmp_path: Path) -> None:
    corpus = data.load("topics")
    sweep = make(tmp_path, [1, 2], "additive", "ddl", "ddl-cc", "ddl-tc", steps=2)
    starts: dict[int, list[dict[str, Tensor]]] = {1: [], 2: []}
    batches: dict[int, list[list[Tensor]]] = {1: [], 2: []}
    for run in sweep.runs:
        trainer, seen = Trainer(run.config, corpus, CPU), []
        model = trainer.model
        shared = {"wte": model.wte.weight.detach().clone()}
        for name, parameter in model.trunk.sublayers.named_parameters():
            shared[name] = parameter.detach().clone()
        loss = trainer._loss
        trainer._loss = lambda w, m, seen=seen, loss=loss: seen.append(w.tokens) or loss(w, m)
        trainer.step()
        trainer.step()
        starts[run.config.seed].append(shared)
        batches[run.config.seed].append(seen)
    for seed in (1, 2):
        assert len(starts[seed]) == 4
        for shared, seen in zip(starts[seed], batches[seed], strict=True):
            assert shared.keys() == starts[seed][0].keys()
            assert all(torch.equal(shared[name], starts[seed][0][name]) for name in shared)
            assert all(map(torch.equal, seen, batches[seed][0]))
    assert not torch.equal(starts[1][0]["wte"], starts[2][0]["wte"])
    assert not torch.equal(batches[1][0][0], batches[2][0][0])


# --- time and memory ----------------------------------------------------------------------------


def test_the_remaining_time(tmp_path: Path) -> None:
    """By variant if it has been timed, else by the mean over those that have been."""
    runs = {run.variant: run for run in make(tmp_path, [1], "additive", "ddl", "ddl-cc").runs}
    pace = Pace()
    assert pace.estimate([(runs["ddl"], 0)]) is None
    pace.add(runs["additive"], 4, 8.0)
    assert pace.estimate([(runs["ddl"], 0), (runs["additive"], 1)]) == pytest.approx(8 + 6)
    pace.add(runs["ddl"], 2, 8.0)
    assert pace.estimate([(runs["ddl"], 3)]) == pytest.approx(4)
    assert pace.estimate([(runs["ddl-cc"], 0)]) == pytest.approx(12)
    pace = Pace()
    pace.add(runs["ddl"], 0, 3.0)  # a run of which only the evaluation was left
    assert pace.estimate([(runs["ddl"], 0)]) is None


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (0.2, "about 1 second"), (1.6, "about 2 seconds"), (89, "about 89 seconds"),
        (90, "about 2 minutes"), (5399, "about 90 minutes"), (5400, "about 2 hours"),
        (129_600, "about 2 days"), (1e7, "about 116 days"),
    ],
)  # fmt: skip
def test_durations(seconds: float, words: str) -> None:
    assert duration(seconds) == words


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux resets the peak of a process")
def test_the_peak_memory_is_not_that_of_the_run_before() -> None:
    filled = bytearray(300_000_000)
    filled[::4096] = b"x" * len(filled[::4096])
    high = peak_memory(CPU)
    del filled
    assert peak_memory(CPU) == high
    reset_peak_memory()
    assert peak_memory(CPU) < high - 200_000_000
