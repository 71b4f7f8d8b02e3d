"""The beginning of a session: a new run with its first step, or the restored state of another."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

from rich.progress import Progress

from ddl.lab.config import TrainConfig
from ddl.paths import CONFIG

from .checkpoint import Manifest
from .resume import Start
from .runs import RunDirectory, load_config
from .saver import restore
from .session import Session
from .trackers import Tracked, Tracker, open_trackers
from .trainer import Trainer
from .watch import Watch


def begin(trainer: Trainer, bar: Progress, start: Start | None) -> Session:
    """Start a run, with its first step, or restore the run that `start` names.

    The run directory is made after the first step, so that a failure before leaves nothing behind.
    """
    if start is not None and start.path is not None and start.manifest is not None:
        return _restored(trainer, bar, start.run, start.path, start.manifest)
    config = trainer.config
    evaluated = trainer.evaluate() if config.init_from is not None else None
    first = trainer.step()
    Watch(trainer).add(first)
    if start is not None:  # a run that was stopped before its first checkpoint begins again
        config = replace(config, out=start.run.path, overwrite=True)
    run = RunDirectory(config.directory) if start is None else start.run
    trackers: list[Tracker] = []

    def opening(stored: TrainConfig, made: int) -> None:
        trackers.extend(open_trackers(config.track, Tracked(run.path, stored, 0, made)))

    with trainer.processes.together():
        if trainer.processes.first:
            RunDirectory.create(
                config, trainer.corpus.tokenizer, lock=True, begun=run, opening=opening
            )
    with _closed_by_errors(run, trackers):
        session = Session(trainer, run, bar, trackers)
        if evaluated is not None:  # of the weights that the run starts from
            with session.clock.paused():
                session.log_validation(0, evaluated)
        session.take(first)
    return session


@contextmanager
def _closed_by_errors(run: RunDirectory, trackers: Sequence[Tracker]) -> Iterator[None]:
    """Unlock the directory and close the trackers if the block raises."""
    with ExitStack() as failing:
        failing.callback(run.unlock)
        for tracker in trackers:
            failing.callback(tracker.close)
        yield
        failing.pop_all()


def _restored(
    trainer: Trainer, bar: Progress, run: RunDirectory, path: Path, manifest: Manifest
) -> Session:
    """Restore the trainer from the checkpoint at `path`, and cut the run's files back to it."""
    processes, config = trainer.processes, trainer.config
    trackers: list[Tracker] = []
    with processes.together():
        restore(trainer, path, manifest)
    with processes.together():
        if processes.first:
            step = manifest.step if manifest.records and run.metrics.path.exists() else 0
            made = (run.path / CONFIG).stat().st_mtime_ns
            stored = load_config(run.path)
            trackers = open_trackers(config.track, Tracked(run.path, stored, step, made))
    with _closed_by_errors(run, trackers):
        with processes.together():
            if processes.first:
                run.drop_unfinished()
                run.metrics.cut(manifest.records)
                run.recordings.cut_after(manifest.step)
        known = {"evaluated": manifest.validation_loss, "seconds": manifest.seconds}
        session = Session(trainer, run, bar, trackers, **known)
        session.saver.saved = (manifest.step, manifest.validation_loss)
        with processes.together():
            if processes.first:
                session.saver.drop_others()
    return session
