"""A run directory: config.json, tokenizer.json, metrics.jsonl, model.safetensors, loss.png."""

from __future__ import annotations

import dataclasses
import json
import os
import typing
from pathlib import Path
from typing import Any, TypeVar

import safetensors
import safetensors.torch
import torch
from torch import nn

from ddl.config import TrainConfig
from ddl.data.tokenizer import Tokenizer, describe, restore
from ddl.errors import NEWER, InputError, first_line
from ddl.files import CONFIG, PathKind, atomic_file, require_kind, write_text, writing
from ddl.models import GPT

from .plots import Record, plot_losses

TOKENIZER, METRICS = "tokenizer.json", "metrics.jsonl"
WEIGHTS, PLOT = "model.safetensors", "loss.png"
FILES = (CONFIG, TOKENIZER, METRICS, WEIGHTS, PLOT)

Config = TypeVar("Config")


class RunDirectory:
    """The files of one training run."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @classmethod
    def create(cls, config: TrainConfig, tokenizer: Tokenizer) -> RunDirectory:
        """Make the directory and write config.json and tokenizer.json.

        Raises InputError if the directory is not empty, unless `config.overwrite` is set: then the
        files of an earlier run are removed, and nothing else.
        """
        refuse_existing(config)
        path = config.directory
        with writing(path):
            path.mkdir(parents=True, exist_ok=True)
            for name in FILES:
                (path / name).unlink(missing_ok=True)
        write_text(path / TOKENIZER, json.dumps(describe(tokenizer)))
        write_text(path / CONFIG, to_json(config))
        return cls(path)

    def log(self, record: Record) -> None:
        """Append a record to metrics.jsonl."""
        path = self.path / METRICS
        with writing(path), path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")

    def metrics(self) -> list[Record]:
        """All records of metrics.jsonl so far."""
        file = self.path / METRICS
        lines = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
        return [json.loads(line) for line in lines]

    def save(self, model: nn.Module) -> None:
        """Write model.safetensors atomically: a reader sees the old file or the new one."""
        with atomic_file(self.path / WEIGHTS) as temporary:
            safetensors.torch.save_model(model, str(temporary))

    def plot(self) -> Path:
        """Draw loss.png from the metrics."""
        path = self.path / PLOT
        plot_losses({self.path.name: self.metrics()}, path)
        return path


def refuse_existing(config: TrainConfig) -> None:
    """Raise InputError unless the run directory is new or empty, or `config.overwrite` is set."""
    path = config.directory
    try:
        names = os.listdir(path)
    except FileNotFoundError:
        return
    except OSError as error:
        raise InputError(f"`out` must be a directory, got {path}: {error.strerror}") from error
    if not names or config.overwrite:
        return
    if any(name in FILES for name in names):
        expected, got, hint = "a directory without a run", "one", ""
    else:
        expected, got, hint = "a new or empty directory", "other files", ", which leaves them alone"
    raise InputError(
        f"`out` must be {expected}, got {path}, which has {got}:"
        f" choose another or add --overwrite{hint}"
    )


def load_config(path: Path) -> TrainConfig:
    """Load a run's configuration; raise InputError if it is missing, damaged, or not a run's."""
    require_kind(path, PathKind.RUN, argument="run")
    return from_json(TrainConfig, _read(path, CONFIG))


def load_run(path: Path, device: torch.device) -> tuple[GPT, Tokenizer]:
    """Load the model, in evaluation mode, and the tokenizer of a run directory.

    Raises InputError if a file is missing, damaged, or does not fit the others.
    """
    config = load_config(path)
    try:
        tokenizer = restore(json.loads(_read(path, TOKENIZER)))
    except (json.JSONDecodeError, RecursionError) as error:
        raise InputError(f"`{path / TOKENIZER}` must be JSON, got: {error}") from error
    with torch.device("meta"):
        model = GPT(config.model)
    model.to_empty(device=device)
    try:
        safetensors.torch.load_model(model, path / WEIGHTS, device=str(device))
    except (OSError, RuntimeError, safetensors.SafetensorError) as error:
        got = first_line(error)
        raise InputError(
            f"`{path / WEIGHTS}` must hold the weights of this run's model, got: {got}"
        ) from error
    return model.eval(), tokenizer


def _read(path: Path, name: str) -> str:
    try:
        return (path / name).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = (isinstance(error, OSError) and error.strerror) or error
        raise InputError(
            f"`run` must be a run directory with {name}, got {path}: {reason}"
        ) from error


def to_json(config: Any) -> str:
    """Convert a configuration to indented JSON; `from_json` reads it back."""
    return json.dumps(dataclasses.asdict(config), indent=2, default=str)


def from_json(kind: type[Config], text: str) -> Config:
    """Build a configuration dataclass from `to_json`'s text.

    A missing field takes its default. Raises InputError if the text is not JSON, a field is unknown
    or a value is invalid.
    """
    try:
        return _build(kind, json.loads(text))
    except (json.JSONDecodeError, TypeError, RecursionError) as error:
        raise InputError(f"`config.json` must hold a {kind.__name__}, got: {error}") from error


def _build(kind: type[Config], values: dict[str, Any], inside: str = "") -> Config:
    """Build a configuration dataclass; `inside` is the path to it, such as "model."."""
    hints = typing.get_type_hints(kind)
    if not isinstance(values, dict):
        raise TypeError(f"{type(values).__name__} instead of an object")
    made = dict(values)
    for name, value in values.items():
        hint = hints.get(name)
        if hint is None:
            raise TypeError(f"the unknown field {inside + name!r}; {NEWER}")
        if dataclasses.is_dataclass(hint):
            made[name] = _build(typing.cast(type, hint), value, f"{inside}{name}.")
        elif isinstance(value, list):
            made[name] = tuple(value)
        elif name == "out" and value is not None:
            made[name] = Path(value)
    return kind(**made)
