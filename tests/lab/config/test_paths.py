"""Every path that a user gives, in options, files, variables and Python: `~` is the home directory,
and an empty text is refused."""

from __future__ import annotations

import dataclasses
import inspect
import json
import os
import pwd
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_type_hints

import pytest

from ddl import environment, hf, paper
from ddl.errors import InputError
from ddl.fields import path_fields
from ddl.lab import config, data, load
from ddl.lab.cli import COMMANDS, main
from ddl.lab.config import BenchConfig, PrepareConfig, TrainConfig
from ddl.lab.config.stored import from_json
from ddl.lab.config.sweeps import parse_sweep
from ddl.lab.doctor.kernels import cache
from ddl.lab.doctor.report import Report

# Fields of text that are no paths; every other one has to be marked as one that may be.
NO_PATHS = {"baseline", "checkpoint", "document_token", "prompt", "separator", "text_field"}
KINDS = [
    kind
    for kind in vars(config).values()
    if dataclasses.is_dataclass(kind) and kind is not config.GPTConfig
]
FIELDS = [(kind, name) for kind in KINDS for name in path_fields(kind)]
NOBODY = "~no-such-user/x"
REFUSED = f"must begin with the ~ of a user whose home directory is known, got {NOBODY}: write the"


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


def made(kind: Any, name: str, path: str) -> str:
    """The path that a configuration has in a field which was given `path`."""
    hints = get_type_hints(kind)
    nothing = dataclasses.MISSING
    needed = [f.name for f in dataclasses.fields(kind) if f.default is f.default_factory is nothing]
    given: dict[str, Any] = {"tokenizer": "bytes"} if kind is PrepareConfig else {}
    for field in {*needed, *({"out", "hf"} & hints.keys())} - {"parts"}:
        given[field] = (Path("a"),) if "tuple" in str(hints[field]) else Path("a")
    value: Any = Path(path) if "Path" in str(hints[name]) else path
    config = kind(
        **{"parts": ()} if kind is BenchConfig else {},
        **given | {name: (value,) if "tuple" in str(hints[name]) else value},
    )
    found = getattr(config, name)
    return str(found[0] if isinstance(found, tuple) else found)


def test_every_command_is_walked() -> None:
    assert {command.options for command in COMMANDS.values()} <= set(KINDS)
    assert len(FIELDS) > 25


@pytest.mark.parametrize("kind", KINDS)
def test_a_field_of_text_is_a_path_or_is_known_to_be_none(kind: Any) -> None:
    text = {field.name for field in dataclasses.fields(kind) if "str" in str(field.type)}
    assert text - set(path_fields(kind)) <= NO_PATHS


@pytest.mark.parametrize(("kind", "name"), FIELDS)
def test_an_option(kind: Any, name: str, home: Path) -> None:
    me = pwd.getpwuid(os.getuid())
    assert made(kind, name, "~/a b") == f"{home}/a b"
    assert made(kind, name, "~") == str(home)
    assert made(kind, name, f"~{me.pw_name}/x") == f"{me.pw_dir}/x"
    assert made(kind, name, "a/~") == "a/~"
    with pytest.raises(InputError, match=f"^`{name}` {REFUSED}"):
        made(kind, name, NOBODY)


@pytest.mark.parametrize(("kind", "name"), FIELDS)
def test_an_empty_text(kind: Any, name: str) -> None:
    """Python makes the current directory of an empty path."""
    if "Path" not in str(get_type_hints(kind)[name]):
        expected = "at least one name" if name == "tasks" else "a path"
        with pytest.raises(InputError, match=f"^`{name}` must be {expected}, got "):
            made(kind, name, "")


OPTIONS = [(name, field) for name in COMMANDS for field in path_fields(COMMANDS[name].options)]


@pytest.mark.parametrize(("command", "name"), OPTIONS)
def test_an_empty_option(
    command: str,
    name: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    nothing = dataclasses.MISSING
    fields = dataclasses.fields(COMMANDS[command].options)
    needed = [f.name for f in fields if f.default is f.default_factory is nothing]
    flag = f"--{name.replace('_', '-')}"
    other = "ops" if command == "bench" else "x"
    given = ["" if n == name else other for n in needed]
    given += [] if name in needed else [flag, ""]
    assert main([command, *given]) == 1
    expected = "at least one name" if name == "tasks" else "a path"
    shown = name.upper() if name in needed else flag
    assert capsys.readouterr().err == f"ddl {command}: `{shown}` must be {expected}, got ''\n"


def test_the_files_of_a_sweep_and_of_a_run(home: Path) -> None:
    values = {"out": "~/runs", "preset": "tiny", "options": {"data": "~/text"}}
    (run,) = parse_sweep(values).runs
    assert (run.config.directory.parent, run.config.data) == (home / "runs", f"{home}/text")
    with pytest.raises(InputError, match=f"^`out` {REFUSED}"):
        parse_sweep(values | {"out": NOBODY})
    with pytest.raises(InputError, match=f"^`options.data` {REFUSED}"):
        parse_sweep(values | {"options": {"data": NOBODY}})
    stored = from_json(TrainConfig, json.dumps({"data": "~/text", "out": "~/run"}))
    assert (stored.data, stored.out) == (f"{home}/text", home / "run")


def test_the_commands(
    home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing is made in a directory named `~`."""
    (home / "here").mkdir()
    monkeypatch.chdir(home / "here")
    (home / "text").write_text("The delta rule erases what it overwrites. " * 100)
    sizes = "--model.hidden-size 32 --model.block-size 32 --steps 1 --eval-batches 1 --device cpu"
    command = ["train", "tiny", *sizes.split(), "--data=~/text"]
    assert main([*command, "--out=~/run"]) == 0
    assert json.loads((home / "run/config.json").read_text())["data"] == f"{home}/text"
    assert main(["train", "--resume=~/run"]) == 0
    assert main([*command, "--out", "~/run", "--resume", "auto"]) == 0
    assert capsys.readouterr().out.count(f"{home}/run has had all of its 1 steps") == 2
    assert main(["train", f"--resume={NOBODY}"]) == 1
    assert capsys.readouterr().err.startswith(f"ddl train: `--resume` {REFUSED}")
    assert load.load("~/run", "cpu").tokenizer is not None
    assert not list((home / "here").iterdir())


def test_a_variable(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DDL_CACHE_DIR", "~/kernels")
    assert environment.cache_directory() == home / "kernels"
    monkeypatch.setenv("DDL_CACHE_DIR", NOBODY)
    report = Report()
    assert cache(report) == {"directory": None}
    assert f"`DDL_CACHE_DIR` {REFUSED}" in str(report.problems)


ENTRIES: list[tuple[Callable[..., Any], str]] = [
    (load.load, "path"),
    (load.load_for_transformers, "path"),
    (data.load, "data"),
    (hf.load, "path"),
    (paper.load, "src"),
    (paper.import_checkpoint, "src"),
]


@pytest.mark.parametrize(("function", "argument"), ENTRIES)
def test_a_function_of_python(function: Callable[..., Any], argument: str, home: Path) -> None:
    more = [NOBODY] if "out" in inspect.signature(function).parameters else []
    with pytest.raises(InputError, match=f"^`{argument}` {REFUSED}"):
        function(NOBODY, *more)
    with pytest.raises(InputError, match=f"^`{argument}` must be a path, got ''$"):
        function("", *more)
    with pytest.raises(InputError, match=f"{home}/nothing"):
        function("~/nothing", *(["~/out"] * len(more)))
