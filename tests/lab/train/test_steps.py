"""Steps: learning rate and autocast; numbers that are not finite; saving beside training."""

from __future__ import annotations

import logging
import math
import re
import resource
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from ddl.errors import DivergedError
from ddl.lab import data
from ddl.lab.config import OptimConfig
from ddl.lab.train import Trainer, checkpoint, train
from ddl.lab.train.runs import RunDirectory
from ddl.lab.train.saver import Saver
from ddl.lab.train.trainer import Step
from ddl.optim import learning_rate
from tests.lab.train.crash import assert_same, curve, tensors
from tests.support.train_cases import quiet, short

CPU = torch.device("cpu")


def test_each_step_has_its_own_learning_rate(tmp_path: Path) -> None:
    """The rate of step i is set before AdamW uses it, not after."""
    config = short(tmp_path, "additive", optim=OptimConfig(lr=1e-3, warmup_steps=2))
    trainer = Trainer(config, data.load("topics"), CPU)
    used: list[float] = []
    trainer.optimizer.register_step_pre_hook(
        lambda optimizer, *_: used.append(optimizer.param_groups[0]["lr"])
    )
    for _ in range(config.steps):
        trainer.step()
    assert used == [learning_rate(config.optim, i, config.steps) for i in range(config.steps)]
    assert len(set(used)) == config.steps


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_autocast_in_training_and_evaluation(tmp_path: Path, precision: str) -> None:
    config = short(tmp_path, "ddl-cc", precision=precision)
    trainer = Trainer(config, data.load("topics"), CPU)
    seen: list[torch.dtype] = []
    trainer.model.register_forward_hook(lambda _, args, out: seen.append(out.logits.dtype))
    trainer.step()
    trainer.evaluate()
    assert set(seen) == {getattr(torch, precision)}
    assert all(p.dtype == torch.float32 for p in trainer.model.parameters())


# --- what is not finite ---------------------------------------------------------------------------


def spoil(monkeypatch: pytest.MonkeyPatch, at: int, **spoiled: float) -> None:
    """Make a step report another loss or gradient norm."""
    original = Trainer.step

    def step(self: Trainer, *flags: Any) -> Step:
        done = original(self, *flags)
        changed = {name: torch.tensor(value) for name, value in spoiled.items()}
        return done._replace(**changed) if self.steps_done == at else done

    monkeypatch.setattr(Trainer, "step", step)


def spoil_weights(monkeypatch: pytest.MonkeyPatch, at: int) -> None:
    """Make a weight infinite in a step whose loss is still finite."""
    original = Trainer.step

    def step(self: Trainer, *flags: Any) -> Step:
        done = original(self, *flags)
        if self.steps_done == at:
            with torch.no_grad():
                self.model.wte.weight[3, 3] = math.inf
        return done

    monkeypatch.setattr(Trainer, "step", step)


@pytest.mark.parametrize("wrong", [math.nan, math.inf])
@pytest.mark.parametrize("quantity", ["loss", "grad_norm"])
def test_a_step_that_is_not_finite_ends_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quantity: str, wrong: float
) -> None:
    """In that step, although nothing is logged or evaluated then."""
    config = short(tmp_path, "additive", log_every=100, eval_every=100, save_every=2)
    spoil(monkeypatch, 5, **{quantity: wrong})
    kept = RunDirectory(config.directory).checkpoint_path(4)
    named = "loss" if quantity == "loss" else "gradient"
    sentence = (
        rf"the {named} is not finite at step 5 \(loss \S+, gradient norm \S+, learning rate \S+\):"
        r" try a lower learning rate or a longer warm-up; the last good checkpoint is "
    )
    with pytest.raises(DivergedError, match=f"^{sentence}{re.escape(str(kept))}$"):
        train(config, quiet())
    assert RunDirectory(config.directory).steps() == [4]


def test_divergence_before_the_first_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = short(tmp_path, "additive")
    with pytest.MonkeyPatch.context() as patch:
        spoil(patch, 1, loss=math.nan)
        with pytest.raises(DivergedError, match=r"^the loss is not finite at step 1 "):
            train(config, quiet())
    assert not config.directory.exists()  # what fails in the first step leaves nothing
    spoil(monkeypatch, 2, loss=math.nan)
    with pytest.raises(DivergedError, match=r"; no checkpoint was saved yet$"):
        train(config, quiet())


def test_weights_that_are_not_finite_are_not_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loss can be finite, for the last time, when a weight is not."""
    config = short(tmp_path, "additive", save_every=1, steps=6)
    spoil_weights(monkeypatch, 4)
    with pytest.raises(DivergedError, match=r"not finite .* the last good checkpoint is .*0003$"):
        train(config, quiet())
    assert RunDirectory(config.directory).steps()[-1] == 3


def test_a_diverged_run_resumes_without_the_record_of_it(tmp_path: Path) -> None:
    """It goes on from its last good checkpoint, as if it had been stopped there."""
    config = short(tmp_path, "additive", save_every=2, log_every=1, resume="auto")
    whole = replace(config, out=tmp_path / "whole", resume=None)
    train(whole, quiet())
    with pytest.MonkeyPatch.context() as patch:
        spoil(patch, 5, loss=math.nan)
        with pytest.raises(DivergedError):
            train(config, quiet())
    run = RunDirectory(config.directory)
    assert "diverged" in run.metrics.read()[-1]
    train(config, quiet())
    assert not any("diverged" in record for record in run.metrics.read())
    assert curve(config) == curve(whole)


def test_a_validation_loss_that_is_not_finite_ends_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Trainer, "evaluate", lambda *_: math.nan)
    config = short(tmp_path, "additive")
    with pytest.raises(DivergedError, match=r"^the validation loss is nan at step 3: try a lower"):
        train(config, quiet())
    last = RunDirectory(config.directory).metrics.read()[-1]
    assert last == {
        "step": 3,
        "diverged": "the validation loss is nan at step 3: try a lower learning rate",
    }


def test_a_sample_of_weights_that_are_not_finite(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = short(tmp_path, "additive", sample_every=4, save_every=3, eval_every=100)
    spoil_weights(monkeypatch, 4)
    sentence = (
        "the probabilities of a sample are not finite at step 4: try a lower learning rate; the"
    )
    with pytest.raises(DivergedError, match=f"^{sentence} last good checkpoint is .*0003$"):
        train(config, quiet())


# --- saving beside training -----------------------------------------------------------------------


def test_training_goes_on_while_a_copy_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = short(tmp_path, "additive")
    whole = train(replace(config, out=tmp_path / "whole", steps=6, save_every=3), quiet()).run
    trainer = Trainer(config, data.load("topics"), CPU)
    for _ in range(6):
        trainer.step()
    trainer.mean_loss()
    may_write, original = threading.Event(), checkpoint.write

    def write(*args: Any, **parts: Any) -> None:
        assert may_write.wait(60)
        original(*args, **parts)

    monkeypatch.setattr(checkpoint, "write", write)
    run = RunDirectory.create(config, trainer.corpus.tokenizer)
    saver = Saver(run, trainer)
    saver.save(None, 0, None)
    trainer.step()  # changes weights, moments and the sum of losses
    assert run.steps() == []
    may_write.set()
    saver.wait()
    saver.close()
    saved = tensors(config)
    expected = tensors(replace(config, out=whole.path))
    assert saved.keys() == expected.keys()
    assert_same(saved, expected)


def test_a_resumed_run_removes_checkpoints_that_are_not_kept(tmp_path: Path) -> None:
    config = short(tmp_path, "additive", save_every=3, keep_every=3)
    run = train(config, quiet()).run
    assert run.steps() == [3, 6]
    train(replace(config, resume="auto", keep_every=None), quiet())
    assert run.steps() == [6]


@pytest.mark.exhaustive
def test_memory_is_flat(tmp_path: Path) -> None:
    """Over 3,000 steps with records, evaluations and checkpoints the process grows by < 4 MiB."""
    config = short(tmp_path, "ddl-cc", steps=3500, log_every=1, eval_every=50, save_every=50)
    resident: list[int] = []
    original = Saver.save

    def save(self: Saver, *args: Any) -> None:
        original(self, *args)
        resident.append(resident_bytes())

    logging.disable()  # pytest keeps every line that torch.distributed.checkpoint logs
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Saver, "save", save)
            train(config, quiet())
    finally:
        logging.disable(logging.NOTSET)
    grown = max(resident[-5:]) - max(resident[8:12])
    assert grown < 4 * 2**20, f"{grown / 2**20:.1f} MiB in 3,000 steps"


def resident_bytes() -> int:
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except FileNotFoundError:
        pytest.skip("the system does not tell a process's memory")
    return pages * resource.getpagesize()
