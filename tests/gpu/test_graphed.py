"""The study's training steps as CUDA graphs do what a trainer's own steps do."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from ddl.lab import data
from ddl.lab.train import Trainer
from study import graphed
from tests.support.train_cases import short


@pytest.fixture(autouse=True)
def _usual_modes() -> Iterator[None]:
    torch.set_default_device(None)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize(
    ("residual", "scaled"),
    [
        ("additive", {}),
        ("hc", {}),
        ("ddl-cc", {}),
        ("ddl-tc", {}),
        ("ddl-cc", {"parameterization": "mup", "base_width": 16}),  # groups with rates of their own
    ],
)
def test_steps_and_validation(
    tmp_path: Path, residual: str, scaled: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = short(tmp_path, residual, device="cuda", deterministic=True, precision="float32")
    config = replace(config, accumulation=1, steps=12, model=replace(config.model, **scaled))
    corpus, device = data.load(config.data), torch.device("cuda")
    own = Trainer(config, corpus, device)
    expected = [own.step() for _ in range(8)]
    validation = own.evaluate()
    rest = replace(config, eval_batches=0)  # whose last batch is smaller
    whole = Trainer(rest, corpus, device).evaluate()

    monkeypatch.setattr(Trainer, "step", Trainer.step)  # restored in the end
    monkeypatch.setattr(Trainer, "_loss", Trainer._loss)
    graphed.install()
    made = Trainer(config, corpus, device)
    found = [made.step() for _ in range(8)]
    assert vars(made)["graphed_step"].graphed.graph is not None
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a.loss, b.loss, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(a.grad_norm, b.grad_norm, rtol=1e-5, atol=1e-6)
    for _ in range(2):  # warmed up, and from a graph
        assert made.evaluate() == pytest.approx(validation, rel=1e-6)
    assert Trainer(rest, corpus, device).evaluate() == pytest.approx(whole, rel=1e-6)
    assert len(made.record()) == len(own.record()) > 0  # which a graph would not show
    assert made.steps_done == own.steps_done
    rates = [[group["lr"] for group in each.optimizer.param_groups] for each in (made, own)]
    assert rates[0] == rates[1]
