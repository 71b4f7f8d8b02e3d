"""Training on a GPU: resumed runs, what is not finite, the figures of a record."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from ddl.errors import DivergedError
from ddl.lab.train import Trainer, train
from ddl.lab.train.runs import RunDirectory
from ddl.lab.train.trainer import Step
from tests.lab.train.crash import assert_same, curve, tensors
from tests.support.train_cases import quiet, short, stop_at


@pytest.fixture(autouse=True)
def _usual_modes() -> Iterator[None]:
    """Commands create their tensors where they say; deterministic algorithms end with the test."""
    torch.set_default_device(None)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("residual", ["additive", "ddl-cc", "ddl-tc"])
def test_a_resumed_run_is_the_uninterrupted_one(
    tmp_path: Path, residual: str, precision: str
) -> None:
    config = short(
        tmp_path, residual, device="cuda", deterministic=True, steps=8, precision=precision
    )
    whole = replace(config, out=tmp_path / "whole")
    train(whole, quiet())
    with pytest.MonkeyPatch.context() as patch:
        stop_at(5, patch)
        train(config, quiet())
    train(replace(config, resume="auto"), quiet())
    assert curve(config) == curve(whole)
    assert_same(tensors(config), tensors(whole))


@pytest.mark.parametrize("quantity", ["loss", "grad_norm"])
def test_what_is_not_finite_is_noticed_one_step_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quantity: str
) -> None:
    original = Trainer.step

    def step(self: Trainer, *flags: object) -> Step:
        done = original(self, *flags)
        wrong = {quantity: torch.full((), math.nan, device=self.device)}
        return done._replace(**wrong) if self.steps_done == 4 else done

    monkeypatch.setattr(Trainer, "step", step)
    config = short(tmp_path, "ddl-cc", device="cuda", log_every=100, eval_every=100, save_every=3)
    with pytest.raises(DivergedError, match="is not finite at step 4 "):
        train(config, quiet())
    assert RunDirectory(config.directory).steps() == [3]


def test_figures_of_the_records(tmp_path: Path) -> None:
    config = short(tmp_path, "ddl-cc", device="cuda", sample_every=3)
    records = train(config, quiet()).run.metrics.read()
    steps = [record for record in records if "loss" in record]
    assert all(record["peak_memory"] >= 4 * 34_484 for record in steps)
    assert all(0 < record.get("mfu", 0.5) < 1 for record in steps)
    betas = [record["mean_beta"] for record in records if "mean_beta" in record]
    assert len(betas) == 2
    assert all(0.5 < beta < 1.5 for beta in betas)
