"""Which checkpoint `ddl train --resume` goes on from, and whether it may."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from ddl.errors import InputError
from ddl.lab.config import TrainConfig
from ddl.lab.config.stored import plain
from ddl.lab.data import Corpus
from ddl.models.tokenizers import describe
from ddl.paths import CONFIG, at_home, is_run

from . import checkpoint
from .checkpoint import Manifest
from .runs import (
    CHECKPOINTS,
    LAST,
    WEIGHTS,
    RunDirectory,
    load_config,
    load_tokenizer,
    saved_config,
)

AUTO = "auto"
# Options that do not change what a run records; the path of the same data may change, too.
FREE = (
    *("out", "overwrite", "resume", "data", "validation", "device"),
    *("save_every", "save_minutes", "keep_every", "track"),
    *("parallel", "process_timeout", "recompute"),
)


class Start(NamedTuple):
    """A run to go on with, and its last checkpoint; both None if it has none yet."""

    run: RunDirectory
    path: Path | None
    manifest: Manifest | None


def find_start(config: TrainConfig, *, lock: bool = False) -> Start | None:
    """Return the run to go on with; None if a new one starts.

    lock: keep other processes from going on with it, before anything in it is read, which they
    might replace. Raises InputError if another one does, `config.resume` names no run, its options
    are others, or its last checkpoint is damaged.
    """
    if config.resume is None:
        return None
    if config.overwrite:
        raise InputError("overwrite", "be left out with `resume`", "both", ("resume",))
    directory = config.directory if config.resume == AUTO else Path(config.resume)
    if config.out not in (None, directory):
        raise InputError(
            "out", "be left out with `resume`", f"{config.out} beside {directory}", ("resume",)
        )
    run = RunDirectory(directory)
    known = is_run(directory) or (directory / CHECKPOINTS).exists()
    if config.resume == AUTO and not known:  # of a run with checkpoints, config.json is damaged
        if lock and directory.is_dir():  # refused now and not after the first step
            run.lock()
            run.unlock()
        return None
    with run.unlocked_by_errors():
        if lock and directory.is_dir():
            run.lock()
        return _start(run, config)


def _start(run: RunDirectory, config: TrainConfig) -> Start:
    directory = run.path
    stored = load_config(directory)
    _check_equal(plain(stored), plain(config), directory)
    path = run.find_checkpoint(LAST)
    if path is None and (directory / WEIGHTS).exists():  # of an earlier version, or of ddl demo
        raise InputError("resume", "be a run with checkpoints", f"{directory}, with weights only")
    if path is None:
        return Start(run, None, None)
    manifest = checkpoint.read_manifest(path)
    if _fixed(plain(saved_config(path, manifest))) != _fixed(plain(stored)):
        raise InputError(
            "resume",
            f"be a run whose checkpoints have its {CONFIG}",
            f"{path}, which has another",
        )
    if path != run.checkpoint_path(manifest.step) or manifest.step > stored.steps:
        raise InputError(
            "resume",
            f"be a run whose checkpoints are named by their steps, up to {stored.steps}",
            f"{path} of step {manifest.step}",
        )
    return Start(run, path, manifest)


def check_corpus(start: Start, corpus: Corpus) -> None:
    """Raise InputError if the checkpoint was trained on other data."""
    if start.manifest is None:
        return
    expected = f"be what {start.run.path} was trained on"
    if describe(load_tokenizer(start.run.path, start.manifest)) != describe(corpus.tokenizer):
        raise InputError("data", expected, f"{corpus.name} with another vocabulary")
    trained, now = start.manifest.data.split("+"), corpus.checksum().split("+")
    if len(trained) != len(now):
        held = "as it was" if len(trained) > 1 else "left out"
        raise InputError(
            "validation",
            f"be {held} when {start.run.path} began",
            corpus.validated_on or "the share held out of the data",
        )
    if trained[0] != now[0]:
        raise InputError("data", expected, f"{corpus.name} with another content")
    if trained != now:
        raise InputError(
            "validation",
            f"be what {start.run.path} was validated on",
            f"{corpus.validated_on} with another content",
        )


def options_of(run: str) -> TrainConfig:
    """The configuration that a run was started with, to go on in its directory."""
    path = at_home(run, argument="resume")
    stored = load_config(path, argument="resume")
    return replace(stored, out=path, overwrite=False, resume=str(path))


def _check_equal(stored: dict[str, Any], given: dict[str, Any], directory: Path) -> None:
    for name, (was, now) in _differences(_fixed(stored), _fixed(given)).items():
        start = "start a new run"
        if not name.startswith("model."):  # whose options come with the weights
            start += f", from these weights with `init_from` {directory}"
        raise InputError(
            name,
            f"be {was!r}, as in {directory}, to go on with it",
            f"{now!r}; for another value {start}",
            ("init_from",),
        )


def _fixed(values: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if name not in FREE}


def _differences(one: dict[str, Any], other: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    found: dict[str, tuple[Any, Any]] = {}
    for name in one.keys() | other.keys():
        was, now = one.get(name), other.get(name)
        if isinstance(was, dict) and isinstance(now, dict):
            found |= {f"{name}.{inner}": pair for inner, pair in _differences(was, now).items()}
        elif was != now:
            found[name] = (was, now)
    return dict(sorted(found.items()))
