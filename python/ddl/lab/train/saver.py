"""Saver: a thread writes checkpoints; the last, the best and the multiples of a step are kept."""

from __future__ import annotations

import platform
import time
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache
from pathlib import Path

import torch

import ddl
from ddl.errors import DivergedError
from ddl.lab.config.stored import plain
from ddl.lab.data.shards import tokenizer_sum
from ddl.lab.machine import output
from ddl.models.finite import not_finite, require_finite, require_no_nan

from . import checkpoint
from .checkpoint import Manifest, Tensors, staged
from .processes import ALONE
from .runs import RunDirectory
from .state import model_tensors, restore_training, training_tensors
from .trainer import Trainer


class Saver:
    """Saves a trainer's state into a run directory, one checkpoint at a time.

    `save` copies the state and returns; a thread writes it. The next `save` waits for an unfinished
    one. `save`, `check` and `wait` raise the error of a save that failed: InputError if the files
    cannot be written, DivergedError if weights are not finite. The checkpoints from before stay.

    Of several processes the first one writes, or each its part, if the model is sharded.
    """

    def __init__(self, run: RunDirectory, trainer: Trainer) -> None:
        self.run, self.trainer = run, trainer
        self.saved: tuple[int, float | None] | None = None  # step and validation loss
        processes = trainer.processes
        losses = processes.from_first(run.validation_losses)
        self.lowest = min(losses.values(), default=float("inf"))
        self._writers = processes.with_own_group() if trainer.sharded else ALONE
        self._writes = trainer.sharded or processes.first
        self._saved_at = time.monotonic()
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._pending: Future[None] | None = None

    def is_late(self) -> bool:
        """Return whether the last save is longer ago than the run's minutes, by this clock."""
        most = self.trainer.config.save_minutes
        return most is not None and (time.monotonic() - self._saved_at) / 60 >= most

    def is_due(self, evaluated: float | None, late: bool) -> bool:
        """Return whether the trainer's step has to be saved.

        evaluated: the validation loss at this step; None if it was not evaluated. late: what
        `is_late` returns, in the first process.
        """
        config, step = self.trainer.config, self.trainer.steps_done
        if evaluated is not None and (config.save_every is None or evaluated < self.lowest):
            return True
        return late or (config.save_every is not None and step % config.save_every == 0)

    def save(self, evaluated: float | None, records: int, seconds: float | None) -> None:
        """Save the trainer's state; `evaluated` as in `is_due`.

        records: lines of metrics.jsonl. seconds: of training so far; None if they are not known.
        """
        self.wait()
        trainer = self.trainer
        manifest = Manifest(
            step=trainer.steps_done,
            validation_loss=evaluated,
            summed=trainer.summed,
            records=records,
            config=plain(trainer.config),
            data=trainer.corpus.checksum(),
            versions=versions(),
            tokenizer=tokenizer_sum(trainer.corpus.tokenizer),
            seconds=seconds,
            parameters=trainer.model.num_parameters(),
        )
        self.lowest = min(self.lowest, float("inf") if evaluated is None else evaluated)
        self.saved, self._saved_at = (trainer.steps_done, evaluated), time.monotonic()
        if not self._writes:
            return
        model, training = staged(model_tensors(trainer)), staged(training_tensors(trainer))
        self._pending = self._thread.submit(self._write, manifest, model, training)

    def check(self) -> None:
        """Raise the error of a save that has failed; wait for nothing."""
        if self._pending is not None and self._pending.done():
            self.wait()

    def wait(self) -> None:
        """Wait for the unfinished save, if there is one, and raise its error."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

    def settle(self) -> None:
        """Wait for the unfinished save, whether it fails or not."""
        if self._pending is not None:
            self._pending.exception()

    def close(self) -> None:
        """Wait for the unfinished save, whether it fails or not, and end the thread."""
        self._thread.shutdown(wait=True)

    def _write(self, manifest: Manifest, model: Tensors, training: Tensors) -> None:
        writers = self._writers
        with writers.together():
            wrong = not_finite(model)
            if wrong is not None:
                raise DivergedError(
                    f"the weights are not finite after step {manifest.step}, {wrong} among them"
                )
        path = self.run.checkpoint_path(manifest.step)
        if writers.from_first(lambda: self._is_updated(path, manifest)):
            return
        checkpoint.write(path, manifest, model=model, training=training, processes=writers)
        if writers.first:
            self.drop_others()

    def _is_updated(self, path: Path, manifest: Manifest) -> bool:
        """Flush the records; if the checkpoint is there, only replace what it says about itself."""
        self.run.metrics.sync()
        self.run.recordings.sync()
        if not path.exists():
            return False
        checkpoint.update(path, manifest)  # the state is the same, but it has been evaluated since
        self.drop_others()
        return True

    def drop_others(self) -> None:
        """Remove the checkpoints that are not kept: neither the last, the best nor `keep_every`."""
        every = self.trainer.config.keep_every
        steps, best = self.run.steps(), self.run.best_step()
        for step in steps[:-1]:
            if step != best and (every is None or step % every):
                self.run.drop_checkpoint(step)


def restore(trainer: Trainer, path: Path, manifest: Manifest) -> None:
    """Set the trainer to the state of a checkpoint.

    Raises InputError if the checkpoint is damaged, of another model or not finite; then do not use
    the trainer.
    """
    training, model = staged(training_tensors(trainer)), model_tensors(trainer)
    checkpoint.read(path, manifest, checkpoint.TRAINING, training)
    checkpoint.read(path, manifest, checkpoint.MODEL, model)
    require_no_nan(training, path)
    require_finite(model, path)
    restore_training(trainer, training)
    trainer.steps_done, trainer.summed = manifest.step, manifest.summed


@cache
def versions() -> dict[str, str | None]:
    """Versions of ddl, torch and Python, and the commit of ddl if it runs from a checkout."""
    folder = str(Path(ddl.__file__).parent)
    return {
        "ddl": ddl.__version__,
        "commit": output("git", "-C", folder, "log", "-1", "--format=%H", "--", folder) or None,
        "torch": torch.__version__,
        "python": platform.python_version(),
    }
