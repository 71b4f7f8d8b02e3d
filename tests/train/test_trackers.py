"""Trackers get every record once, also of a resumed run; stand-ins take their packages' places."""

from __future__ import annotations

import re
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

import pytest

from ddl import cli
from ddl.config import TrainConfig
from ddl.errors import InputError
from ddl.train import train
from ddl.train.runs import RunDirectory
from tests.support.train_cases import quiet, short, stop_at
from tests.train.crash import assert_same, curve, tensors

Calls = list[tuple[str, tuple[Any, ...], dict[str, Any]]]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    """Every call of a stand-in for wandb, trackio or torch.utils.tensorboard."""
    seen: Calls = []

    class Anything:
        def __init__(self, name: str) -> None:
            self.name = name

        def __getattr__(self, attribute: str) -> Any:
            return Anything(f"{self.name}.{attribute}")

        def __call__(self, *args: Any, **options: Any) -> Any:
            seen.append((self.name, args, options))
            return Anything(self.name)

    for name in ("wandb", "trackio", "tensorboard", "torch.utils.tensorboard"):
        module = ModuleType(name)
        for function in ("init", "log", "finish", "SummaryWriter"):
            setattr(module, function, Anything(f"{name}.{function}"))
        monkeypatch.setitem(sys.modules, name, module)
    return seen


def logged(calls: Calls, name: str) -> list[dict[str, Any]]:
    return [{"step": options["step"], **args[0]} for n, args, options in calls if n == name]


@pytest.mark.parametrize("tracker", ["wandb", "trackio"])
def test_every_record_is_logged(tracker: str, calls: Calls, tmp_path: Path) -> None:
    config = short(tmp_path, "additive", track=(tracker,), sample_every=3)
    run = train(config, quiet()).run
    name, _, options = calls[0]
    assert name == f"{tracker}.init"
    assert options["project"] == "ddl"
    assert re.fullmatch("run" if tracker == "wandb" else "run-[0-9a-f]{8}", options["name"])
    assert options["config"]["model"]["residual"] == "additive"
    log = "wandb.init.log" if tracker == "wandb" else "trackio.log"
    assert logged(calls, log) == run.metrics.read()
    assert calls[-1][0].endswith("finish")


def test_every_record_is_in_tensorboard(calls: Calls, tmp_path: Path) -> None:
    config = short(tmp_path, "additive", track=("tensorboard",), sample_every=3)
    run = train(config, quiet()).run
    made, *added, closed = calls
    assert made[:2] == ("torch.utils.tensorboard.SummaryWriter", (str(run.path / "tensorboard"),))
    assert made[2] == {"purge_step": None}
    assert closed[0].endswith("close")
    expected = [(k, v, r["step"]) for r in run.metrics.read() for k, v in r.items() if k != "step"]
    assert [args for _, args, _ in added] == expected
    texts = [args[0] for name, args, _ in added if name.endswith("add_text")]
    assert texts == ["sample", "sample"]


@pytest.mark.parametrize(("tracker", "known_by"), [("wandb", "id"), ("trackio", "name")])
def test_a_resumed_run_goes_on_in_the_same_one(
    tracker: Literal["wandb", "trackio"], known_by: str, calls: Calls, tmp_path: Path
) -> None:
    config = short(tmp_path, "additive", track=(tracker,))
    with pytest.MonkeyPatch.context() as patch:
        stop_at(3, patch)
        train(config, quiet())
    train(replace(config, resume="auto"), quiet())
    first, second = (options for name, _, options in calls if name == f"{tracker}.init")
    assert first[known_by] == second[known_by]
    assert second["resume"] == "allow"
    train(replace(config, overwrite=True), quiet())
    assert calls[-1][0].endswith("finish")
    third = [options for name, _, options in calls if name == f"{tracker}.init"][-1]
    assert third[known_by] != first[known_by]


@pytest.mark.parametrize("broken", ["log", "finish"])
def test_a_tracker_that_fails(
    broken: str, calls: Calls, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run ends with its error after a checkpoint; resumed, it is the uninterrupted one."""

    def fail(*_: object, **__: object) -> None:
        raise ConnectionError("no network")

    config = short(tmp_path, "additive", track=("trackio", "wandb"), save_every=100, log_every=1)
    monkeypatch.setattr(sys.modules["trackio"], broken, fail)
    with pytest.raises(ConnectionError, match=r"^no network$"):
        train(config, quiet())
    run = RunDirectory(config.directory)
    assert run.steps() == [1 if broken == "log" else 6]
    assert calls[-1][0].endswith("finish")  # of the other tracker
    train(replace(config, track=(), resume="auto"), quiet())  # it is not locked
    whole = replace(config, track=(), out=tmp_path / "whole")
    train(whole, quiet())
    assert curve(config) == curve(whole)
    assert_same(tensors(config), tensors(whole))


@pytest.mark.parametrize("tracker", ["wandb", "trackio", "tensorboard"])
def test_a_missing_package_is_named_with_its_extra(
    tracker: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setitem(sys.modules, tracker, None)
    options = f"--steps 2 --device cpu --track {tracker} --out {tmp_path / 'run'}"
    assert cli.main(["train", "tiny", *options.split()]) == 1
    needed = f"`ddl train` needs the `train,{tracker}` extra: pip install 'ddl-rs[train,{tracker}]'"
    assert capsys.readouterr().err == f"ddl train: {needed}\n"
    assert not (tmp_path / "run").exists()


def test_an_unknown_tracker_is_refused() -> None:
    with pytest.raises(
        InputError, match=r"^`track` must be names out of tensorboard, wandb, track"
    ):
        TrainConfig(track=("mlflow",))  # type: ignore[arg-type]
