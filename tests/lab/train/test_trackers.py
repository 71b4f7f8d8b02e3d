"""Trackers get every record once, also of a resumed run; stand-ins take their packages' places."""

from __future__ import annotations

import getpass
import os
import re
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

import pytest

from ddl.errors import InputError
from ddl.lab import cli
from ddl.lab.config import TrainConfig
from ddl.lab.train import train
from ddl.lab.train.runs import RunDirectory
from tests.lab.train.crash import assert_same, curve, tensors
from tests.support.train_cases import quiet, short, stop_at

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


def log_in(*_: object, **__: object) -> None:
    getpass.fallback_getpass("Key: ")  # as without a terminal


def fail(*_: object, **__: object) -> None:
    raise ConnectionError("no network\nand a traceback")


def leave(*_: object, **__: object) -> None:
    raise SystemExit("no key")


FAILURES: list[tuple[Callable[..., None], str]] = [
    (fail, "no network"),
    (leave, "no key"),
    (lambda *_, **__: input("Key: "), "a prompt for input: log in before"),
    (log_in, "a prompt for input: log in before"),
    (lambda *_, **__: sys.stdin.isatty() or fail(), "no network"),
]


def found(folder: Path) -> dict[str, bytes]:
    return {str(f.relative_to(folder)): f.read_bytes() for f in folder.rglob("*") if f.is_file()}


def opening(tracker: str, act: Callable[..., None], patch: pytest.MonkeyPatch) -> None:
    """Let a tracker leave a file in its folder, and then do something, when it is opened."""

    def opened(*places: str, **options: Any) -> None:
        folder = Path(options.get("dir", "."), "wandb") if tracker == "wandb" else Path(*places)
        if tracker != "trackio":
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "half").write_text("")
        act()

    module = {"tensorboard": "torch.utils.tensorboard"}.get(tracker, tracker)
    name = "SummaryWriter" if tracker == "tensorboard" else "init"
    patch.setattr(sys.modules[module], name, opened)


@pytest.mark.table(1)
@pytest.mark.parametrize("tracker", ["wandb", "trackio", "tensorboard"])
@pytest.mark.parametrize(("act", "got"), FAILURES)
def test_a_tracker_that_cannot_be_opened_leaves_nothing_behind(
    tracker: Literal["wandb", "trackio", "tensorboard"],
    act: Callable[..., None],
    got: str,
    calls: Calls,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Neither of a new run, nor of one that would be replaced, nor of one that would go on."""
    reading, _ = os.pipe()  # nobody ever writes into it
    monkeypatch.setattr(sys, "stdin", os.fdopen(reading))
    config = short(tmp_path / "runs", "additive", steps=2, eval_every=2)
    failing = replace(config, track=("trackio" if tracker == "wandb" else "wandb", tracker))
    sentence = f"^`track` must be trackers that can be opened, got {tracker} with: {got}$"
    with monkeypatch.context() as patch:
        opening(tracker, act, patch)
        with pytest.raises(InputError, match=sentence):
            train(failing, quiet())
    assert not list(tmp_path.iterdir())
    assert calls[-1][0].endswith("finish")  # the other one is closed
    train(replace(config, track=(tracker,)), quiet())
    (config.directory / "wandb").mkdir(exist_ok=True)
    (config.directory / "wandb" / "earlier").write_text("")
    before = found(config.directory)
    opening(tracker, act, monkeypatch)
    for changes in ({"overwrite": True}, {"resume": "auto"}):
        with pytest.raises(InputError, match=sentence):
            train(replace(failing, **changes), quiet())
        assert found(config.directory) == before


def test_a_run_that_replaces_another_has_its_own_files(
    calls: Calls, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = short(tmp_path, "additive", steps=2, eval_every=2, track=("wandb",))
    folder = config.directory / "wandb"
    folder.mkdir(parents=True)
    (folder / "earlier").write_text("")
    init = sys.modules["wandb"].init
    opening("wandb", lambda: None, monkeypatch)
    opened = sys.modules["wandb"].init
    both = lambda **options: (opened(**options), init(**options))[1]  # noqa: E731
    monkeypatch.setattr(sys.modules["wandb"], "init", both)
    train(replace(config, overwrite=True), quiet())
    assert [file.name for file in folder.iterdir()] == ["half"]


@pytest.mark.parametrize("tracker", ["wandb", "trackio", "tensorboard"])
@pytest.mark.parametrize(
    ("file", "text", "sentence"),
    [
        (None, "", "`ddl train` needs the `train,{}` extra: pip install 'ddl-rs[train,{}]'"),
        ("__init__.py", "", "`--track` must be trackers that can be opened, got {} with: "),
        ("__init__.py", "1 / 0", "`--track` must be trackers that can be opened, got {} with: Z"),
        ("__init__.py", "import nowhere", "`--track` must be trackers that can be opened, got {}"),
    ],
)
def test_another_package_of_the_name(
    tracker: str,
    file: str | None,
    text: str,
    sentence: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """As a folder `wandb` in the working directory is one, if the real one is missing."""
    folder = tmp_path / tracker
    folder.mkdir()
    if file is not None:
        (folder / file).write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    for name in (tracker, "torch.utils.tensorboard"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    options = f"--steps 2 --device cpu --track {tracker} --out {tmp_path / 'run'}"
    assert cli.main(["train", "tiny", *options.split()]) == 1
    error = capsys.readouterr().err
    assert error.startswith("ddl train: " + sentence.format(tracker, tracker))
    assert len(error.splitlines()) == 1
    assert not (tmp_path / "run").exists()


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
