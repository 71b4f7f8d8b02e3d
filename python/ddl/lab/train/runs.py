"""A run directory: config.json, tokenizer.json, metrics.jsonl, checkpoints/, loss.png.

recordings.jsonl has what `record_every` asks for, and inspect/ what `ddl inspect` found.

A run without checkpoints has its weights in model.safetensors: `ddl demo` and earlier versions of
`ddl train` write it.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from ddl.errors import InputError, first_line, reason_of
from ddl.files import (
    alone_in,
    atomic_file,
    make_directory,
    names_in,
    new_directories,
    remove,
    remove_at_once,
    unfinished,
    write_text,
    writing,
)
from ddl.lab.config import TrainConfig
from ddl.lab.config.stored import from_json, to_json
from ddl.lab.data.shards import tokenizer_sum
from ddl.models.tokenizers import Tokenizer, describe, restore_json
from ddl.paths import CONFIG, RUN_METRICS, PathKind, is_run, require_kind

from . import checkpoint
from .json_lines import JsonLines
from .plots import plot_losses

if TYPE_CHECKING:  # what compares runs does not wait for torch
    import torch
    from torch import nn

    from ddl.models import GPT

TOKENIZER, METRICS, CHECKPOINTS = "tokenizer.json", RUN_METRICS, "checkpoints"
RECORDINGS = "recordings.jsonl"  # of `record_every`
DIVERGED = "diverged"  # in a record: the sentence that ended training
WEIGHTS, PLOT, INSPECTED = "model.safetensors", "loss.png", "inspect"
TRACKED = ("tensorboard", "wandb")
# In the order of their removal: config.json is last, because without it the directory is no run.
FILES = (TOKENIZER, METRICS, RECORDINGS, CHECKPOINTS, WEIGHTS, PLOT, INSPECTED, *TRACKED, CONFIG)

LAST, BEST = "last", "best"
STEP = re.compile(r"step-(\d{8,})")


class RunDirectory:
    """The files of one training run."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.metrics = JsonLines(path / METRICS)
        self.recordings = JsonLines(path / RECORDINGS)
        self._alone, self._locked = ExitStack(), False

    def lock(self) -> None:
        """Keep other processes from training into this directory until `unlock` or the exit.

        A second call has no effect. Raises InputError if another process trains into it.
        """
        if not self._locked:
            self._alone.enter_context(alone_in(self.path))
            self._locked = True

    def unlock(self) -> None:
        """Let other processes train into this directory again."""
        self._alone.close()
        self._locked = False

    def __reduce__(self) -> tuple[type[RunDirectory], tuple[Path]]:
        """In another process it is the same directory without the lock."""
        return RunDirectory, (self.path,)

    @classmethod
    def create(
        cls,
        config: TrainConfig,
        tokenizer: Tokenizer,
        *,
        lock: bool = False,
        begun: RunDirectory | None = None,
        opening: Callable[[TrainConfig, int], object] | None = None,
    ) -> RunDirectory:
        """Make the directory, lock it if requested, and write config.json and tokenizer.json.

        begun: the directory, locked, of a run that begins again. opening: called before an earlier
        run is removed, with the configuration that is stored, and the time in nanoseconds that
        config.json will have. If it raises, the directory is as it was.

        Raises InputError if the directory is not empty, unless `config.overwrite` is set: then the
        files of an earlier run are removed, and nothing else.
        """
        path = config.directory
        run = cls(path) if begun is None else begun
        with new_directories(path), run.unlocked_by_errors():
            if lock:
                run.lock()
            refuse_existing(config)
            make_directory(path)
            run.drop_unfinished()
            earlier = run._files()
            requested = dataclasses.replace(config, resume=None, overwrite=False)
            with atomic_file(path / CONFIG) as temporary:  # without it the directory is no run
                temporary.write_text(to_json(requested), encoding="utf-8")
                if opening is not None:
                    opening(requested, temporary.stat().st_mtime_ns)
                for file in earlier:
                    remove(file)
                write_text(path / TOKENIZER, json.dumps(describe(tokenizer)))
        return run

    def _files(self) -> list[Path]:
        """The files of a run, of which the trackers have those in their folders."""
        files = [self.path / name for name in FILES]
        parts = ([*f.iterdir()] if f.name in TRACKED and f.is_dir() else [f] for f in files)
        return [file for part in parts for file in part]

    @contextmanager
    def unlocked_by_errors(self) -> Iterator[None]:
        """Unlock if the block raises, so that another process may train into the directory."""
        try:
            yield
        except BaseException:
            self.unlock()
            raise

    def save(self, model: nn.Module) -> None:
        """Write model.safetensors atomically: a reader sees the old file or the new one."""
        import safetensors.torch

        with atomic_file(self.path / WEIGHTS) as temporary:
            safetensors.torch.save_model(model, str(temporary))

    def plot(self) -> Path:
        """Draw loss.png from the metrics."""
        path = self.path / PLOT
        plot_losses({self.path.name: self.metrics.read()}, path)
        return path

    def checkpoint_path(self, step: int) -> Path:
        """The directory of the checkpoint after this step, whether it exists or not."""
        return self.path / CHECKPOINTS / f"step-{step:08}"

    def steps(self) -> list[int]:
        """The steps of all checkpoints, in order."""
        folder = self.path / CHECKPOINTS
        try:
            names = os.listdir(folder)
        except FileNotFoundError:
            return []
        except OSError as error:
            raise InputError(
                "run", f"have a readable directory {CHECKPOINTS}", f"{folder}: {reason_of(error)}"
            ) from error
        found = map(STEP.fullmatch, names)
        return sorted(int(match[1]) for match in found if match)

    def best_step(self) -> int | None:
        """The step of the checkpoint with the lowest validation loss; None without one."""
        losses = self.validation_losses()
        return min(losses, key=losses.__getitem__, default=None)

    def validation_losses(self) -> dict[int, float]:
        """The validation loss of every checkpoint that was evaluated, by its step."""
        found = {
            step: checkpoint.read_manifest(self.checkpoint_path(step)).validation_loss
            for step in self.steps()
        }
        return {step: loss for step, loss in found.items() if loss is not None}

    def find_checkpoint(self, which: str) -> Path | None:
        """Return the checkpoint "last", "best" or of a step; if none was evaluated, best is last.

        Returns None for "last" or "best" if the run has no checkpoint. Raises InputError for a
        step without one.
        """
        steps = self.steps()
        if which in (LAST, BEST):
            step = self.best_step() if which == BEST else None
            last = steps[-1] if steps else None
            return None if last is None else self.checkpoint_path(last if step is None else step)
        if not which.isdecimal() or int(which) not in steps:
            saved = ", ".join(map(str, steps)) or "no step"
            expected = f"{LAST}, {BEST} or a step that was saved, one of {saved}"
            raise InputError("checkpoint", f"be {expected}", repr(which))
        return self.checkpoint_path(int(which))

    def drop_checkpoint(self, step: int) -> None:
        """Remove a checkpoint; it vanishes in one step."""
        remove_at_once(self.checkpoint_path(step))

    def drop_unfinished(self) -> None:
        """Remove what a killed process has left of files that it was writing or removing."""
        checkpoints = self.path / CHECKPOINTS
        for folder in (self.path, *([checkpoints] if checkpoints.is_dir() else [])):
            for name in os.listdir(folder) if folder.exists() else ():
                if _is_unfinished(name):
                    with writing(folder):
                        remove(folder / name)


def _precedes_config(name: str) -> bool:
    """Whether a run that was killed before it had its config.json may have left this file."""
    return name == TOKENIZER or _is_unfinished(name)


def _is_unfinished(name: str) -> bool:
    """Whether a killed process was writing this file or checkpoint, or removing it."""
    final = unfinished(name)
    return final in (*FILES, checkpoint.MANIFEST) or bool(final and STEP.fullmatch(final))


def refuse_existing(config: TrainConfig) -> None:
    """Raise InputError unless the run directory is new or empty, or `config.overwrite` is set."""
    path = config.directory
    names = names_in(path)
    if not names or config.overwrite:
        return
    if config.resume is not None and CONFIG not in names and all(map(_precedes_config, names)):
        return  # a run was killed before it had anything to lose
    if config.resume is not None and is_run(path):
        raise InputError(
            "resume",
            "be a run that no other process goes on with",
            (
                f"{path}, in which another one has begun a run meanwhile: repeat the command,"
                " which goes on with it"
            ),
        )
    if any(name in FILES for name in names):
        expected, got, hint = "a directory without a run", "one", ""
    else:
        expected, got, hint = "a new or empty directory", "other files", ", which leaves them alone"
    raise InputError(
        "out", f"be {expected}", f"{path}, which has {got}: choose another or add --overwrite{hint}"
    )


def load_config(path: Path, *, argument: str = "run") -> TrainConfig:
    """Load a run's configuration.

    argument: the name of `path` in errors. Raises InputError if it is missing, damaged, or not a
    run's.
    """
    require_kind(path, PathKind.RUN, argument=argument)
    return from_json(TrainConfig, _read(path, CONFIG))


def load_run(path: Path, device: torch.device, which: str = LAST) -> tuple[GPT, Tokenizer]:
    """Load the model, in evaluation mode, and the tokenizer of a run directory.

    which: the checkpoint: "last", "best" (by validation loss) or a step.

    Raises InputError if a file is missing, damaged, or does not fit the others, or if the weights
    are not finite.
    """
    import torch

    from ddl.models import GPT
    from ddl.models.finite import require_finite

    config = load_config(path)
    found = RunDirectory(path).find_checkpoint(which)
    manifest = None if found is None else checkpoint.read_manifest(found)
    if found and manifest and saved_config(found, manifest).model != config.model:
        got = f"{found}, which has another model"
        raise InputError("run", f"be a run whose checkpoints have its {CONFIG}", got)
    tokenizer = load_tokenizer(path, manifest)
    with torch.device("meta"):
        model = GPT(config.model)
    model.to_empty(device=device)
    if found is None or manifest is None:
        _load_weights(path / WEIGHTS, model, device)
    else:
        checkpoint.read(found, manifest, checkpoint.MODEL, model.state_dict())
    require_finite(model.state_dict(), found or path / WEIGHTS)
    return model.eval(), tokenizer


def saved_config(path: Path, manifest: checkpoint.Manifest) -> TrainConfig:
    """The configuration in the manifest of the checkpoint at `path`, with fields that it lacks."""
    return from_json(TrainConfig, json.dumps(manifest.config), path / checkpoint.MANIFEST)


def weights_folder(run: Path, which: str = LAST) -> Path:
    """The directory with the safetensors of a run's checkpoint; the run itself if it has none."""
    found = RunDirectory(run).find_checkpoint(which)
    return run if found is None else found / checkpoint.MODEL


def load_tokenizer(path: Path, manifest: checkpoint.Manifest | None) -> Tokenizer:
    """Load a run's tokenizer.

    manifest: of the checkpoint that it is used with. Raises InputError if the tokenizer is missing,
    damaged, or another than that of the checkpoint: it would change the text in silence.
    """
    tokenizer = restore_json(_read(path, TOKENIZER), path / TOKENIZER)
    if manifest and manifest.tokenizer not in (None, tokenizer_sum(tokenizer)):
        raise InputError(
            path / TOKENIZER,
            f"be the tokenizer of the run's checkpoint of step {manifest.step}",
            "another: it was damaged or changed",
        )
    return tokenizer


def _load_weights(file: Path, model: GPT, device: torch.device) -> None:
    import safetensors.torch

    try:
        safetensors.torch.load_model(model, file, device=str(device))
    except (OSError, RuntimeError, safetensors.SafetensorError) as error:
        got = first_line(error)
        raise InputError(file, "hold the weights of this run's model", got) from error


def _read(path: Path, name: str) -> str:
    try:
        return (path / name).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        got = f"{path}: {reason_of(error)}"
        raise InputError("run", f"be a run directory with {name}", got) from error
