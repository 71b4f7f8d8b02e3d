"""Session: the steps of a run, with their metrics, evaluations and checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress

from rich.panel import Panel
from rich.progress import Progress
from rich.text import Text

from ddl.errors import DivergedError, InputError
from ddl.lab.config import BASELINES
from ddl.models.tokenizers import printable
from ddl.recording import Recording

from .clock import Clock
from .failures import Failures
from .json_lines import Record
from .metrics import Metrics
from .runs import DIVERGED, LAST, RunDirectory
from .saver import Saver
from .trackers import Tracker
from .trainer import Flags, Step, Trainer
from .watch import Watch, check_validation, sampling


class Session:
    """A trainer and the run directory it writes to.

    After a step come its losses, evaluation, sample, recording and checkpoint, in this order. If a
    signal or a crash stops the run in between, a resumed one does the rest. An error of a tracker
    or of the output stops it as a signal does, and is raised after the checkpoint.

    Several processes each have a session and do the same; the first one writes. What one of them
    alone has seen, a signal or an error, it tells the others with its next step.
    """

    def __init__(
        self,
        trainer: Trainer,
        run: RunDirectory,
        bar: Progress,
        trackers: Sequence[Tracker],
        *,
        evaluated: float | None = None,
        seconds: float | None = 0.0,
    ) -> None:
        self.trainer, self.run, self.bar = trainer, run, bar
        self.evaluated = evaluated  # the validation loss of this step; None if it is not known
        self.processes = trainer.processes
        past = self.processes.from_first(lambda: _past(run, trainer.config.record_every))
        self.logged, self._sampled_at, self._recorded_at = past
        self._measured: tuple[int, Recording] | None = None  # with its step
        self.watch, self.saver = Watch(trainer), Saver(run, trainer)
        self.metrics = Metrics(trainer)
        self.trackers = trackers
        self.failures = Failures(alone=self.processes.alone)
        self._signalled: Callable[[], bool] = lambda: False
        self._stopping = False  # in several processes: whether they have agreed to stop
        self.clock, self._timed = Clock(seconds), 0  # seconds, steps since the last record
        name = trainer.config.model.residual
        total, done = trainer.config.steps, trainer.steps_done
        self._task = bar.add_task(name, total=total, completed=done, loss="", speed="")

    def run_until(self, signalled: Callable[[], bool]) -> None:
        """Train to the last step; if `signalled()`, end after a step and its checkpoint."""
        self._signalled = signalled
        with ExitStack() as ending:  # each of these is done, even if one raises
            ending.callback(self.run.unlock)
            for tracker in self.trackers:
                ending.callback(tracker.close)
            ending.callback(self.saver.close)
            self._train()
            with self.processes.together():
                with self._noting_divergence():
                    self.saver.wait()
                self.failures.raise_any()

    def _train(self) -> None:
        trainer = self.trainer
        while True:
            if not self._stops():
                self._evaluate_if_due()
            if not self._stops():
                self._sample_if_due()
                self._record_if_due()
            ending = self._stops() or trainer.steps_done == trainer.config.steps
            self._save_if_due(ending)
            if ending:
                return
            self.take(trainer.step(self._flags))

    def _flags(self) -> Flags:
        """The signals that this process sends with its next step."""
        return Flags(
            stop=self._must_stop(),
            broken=self.failures.own is not None,
            late=self.processes.first and self.saver.is_late(),
        )

    def _must_stop(self) -> bool:
        """Whether this process has to stop, for a signal or an error of the output."""
        return self._signalled() or self.failures.output is not None

    def _stops(self) -> bool:
        """Whether training stops. Several processes know it of each other from the last step."""
        if self.processes.alone:
            return self._must_stop()
        if self.watch.flags.broken:
            with self.processes.together():
                self.failures.raise_own()
        self._stopping |= self.watch.flags.stop
        return self._stopping

    def take(self, step: Step) -> None:
        """Check the loss and gradient of a step, and log them every `log_every` steps.

        Raises DivergedError if one is not finite; on a GPU after the next step.
        """
        config = self.trainer.config
        self.evaluated = None
        self._timed += 1
        with self._noting_divergence():
            self.watch.add(step)
        with self.failures.of_this_process(), self._noting_divergence():
            self.saver.check()
        done = self.trainer.steps_done
        if done % config.log_every and done != config.steps:
            return
        steps, loss = self.trainer.summed, self.trainer.mean_loss()  # waits for the device
        with self._noting_divergence():
            self.watch.finish()
        with self.clock.paused():
            line = {
                "step": done,
                "loss": loss,
                "grad_norm": float(step.grad_norm),
                "lr": self.trainer.optimizer.param_groups[0]["lr"],
            }
            line |= self.metrics.of_training(loss, steps)
            line |= self.metrics.spent(done, self.clock.total)
            speed = self._timed * self.trainer.config.tokens_per_step / self.clock.lap()
            self._log(line | self.metrics.of_speed(speed))
            text = f"{speed:,.0f} tok/s"
            self.bar.update(self._task, completed=done, loss=f"mean loss {loss:.3f}", speed=text)
        self._timed = 0

    def _evaluate_if_due(self) -> None:
        config, done = self.trainer.config, self.trainer.steps_done
        last = done == config.steps
        if self.evaluated is not None or (done % config.eval_every and not last):
            return
        with self.clock.paused():
            self.evaluated = self.trainer.evaluate(self._must_stop)
            self._stopping |= self.evaluated is None
            if self.evaluated is not None:
                with self._noting_divergence():
                    check_validation(self.evaluated, done)
                more = {}
                if config.model.residual not in BASELINES:
                    more["mean_beta"] = float(self._measure().statistics("beta").mean.mean())
                self.log_validation(done, self.evaluated, more)

    def log_validation(self, step: int, loss: float, more: Record | None = None) -> None:
        """Log and print a validation loss, in nats per token, with further values."""
        figures = self.metrics.of_validation(loss)
        spent = self.metrics.spent(step, self.clock.total)
        validation = {f"validation_{name}": value for name, value in figures.items()}
        self._log({"step": step, "validation_loss": loss} | validation | (more or {}) | spent)
        with self.failures.of_output():
            self.bar.console.print(f"step {step}: validation loss {loss:.4f}")

    def _sample_if_due(self) -> None:
        every, done = self.trainer.config.sample_every, self.trainer.steps_done
        if every is None or done % every or self._sampled_at == done:
            return
        with self.clock.paused():
            with self._noting_divergence(), sampling(done):
                text = self.trainer.sample()
            self._sampled_at = done
            self._log({"step": done, "sample": text})
            with self.failures.of_output():
                self.bar.console.print(Panel(Text(printable(text)), title=f"step {done}"))

    def _record_if_due(self) -> None:
        """Append what the sublayers do to the stream at this step to recordings.jsonl."""
        config, done = self.trainer.config, self.trainer.steps_done
        every, last = config.record_every, done == config.steps
        if every is None or (done % every and not last) or self._recorded_at == done:
            return
        with self.clock.paused():
            recording = self._measure()
            if self.processes.first:
                with self.failures.of_this_process():
                    self.run.recordings.append({"step": done, **recording.summary()})
            self._recorded_at = done

    def _measure(self) -> Recording:
        """Statistics of the sublayers at this step, measured once."""
        done = self.trainer.steps_done
        if self._measured is None or self._measured[0] != done:
            self._measured = (done, self.trainer.record())
        return self._measured[1]

    def _save_if_due(self, ending: bool) -> None:
        step, (at, _) = self.trainer.steps_done, self.saver.saved or (0, None)
        if self.processes.alone:
            late = self.saver.is_late()
        else:  # a GPU's flags are a step old
            late = self.watch.flags.late and step > at + 1
        saved = (step, self.evaluated) == self.saver.saved
        if not saved and (ending or self.saver.is_due(self.evaluated, late)):
            with self._noting_divergence():
                self.watch.finish()
            with self.clock.paused():
                with self.processes.together():
                    self.failures.raise_own()
                    with self._noting_divergence():
                        self.saver.wait()
                with self._noting_divergence():
                    self.saver.save(self.evaluated, self.logged, self.clock.total)

    def _log(self, line: Record) -> None:
        if not self.processes.first:
            return
        with self.failures.of_this_process():
            self.run.metrics.append(line)
        self.logged += 1
        for tracker in self.trackers:
            with self.failures.of_output():
                tracker.log(line)

    @contextmanager
    def _noting_divergence(self) -> Iterator[None]:
        """If the block raises DivergedError, record it and name the last good checkpoint."""
        try:
            yield
        except DivergedError as error:
            if not self.processes.first:
                raise
            with suppress(InputError, OSError):  # a full disk must not hide that it diverged
                self.run.metrics.append({"step": self.trainer.steps_done, DIVERGED: str(error)})
            self.saver.settle()
            good = self.run.find_checkpoint(LAST)
            kept = f"the last good checkpoint is {good}" if good else "no checkpoint was saved yet"
            raise DivergedError(f"{error}; {kept}") from None


def _past(run: RunDirectory, record_every: int | None) -> tuple[int, int, int]:
    """The lines of metrics.jsonl so far, and the last steps with a sample and a recording."""
    metrics = run.metrics.read()
    recordings = run.recordings.read() if record_every else []
    sampled = max((r["step"] for r in metrics if "sample" in r), default=0)
    return len(metrics), sampled, max((r["step"] for r in recordings), default=0)
