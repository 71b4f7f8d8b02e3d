"""A model that was moved, or first used, under inference mode can be trained afterwards."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from ddl.models import GPT
from tests.models.test_cache import model_of, tokens
from tests.support.nanogpt_cases import annealed

MOVES: dict[str, Callable[[nn.Module], Any]] = {
    "to": lambda model: model.to("cpu"),
    "the dtype it has": lambda model: model.double(),
}


@pytest.mark.parametrize("move", MOVES.values(), ids=MOVES)
def test_a_moved_model_trains(move: Callable[[nn.Module], Any]) -> None:
    model, idx = model_of("ddl-tc").requires_grad_(), tokens(2, 12)
    expected = model(idx, labels=idx).loss
    with torch.inference_mode():
        move(model)
    loss = model(idx, labels=idx).loss
    assert torch.equal(loss, expected)
    loss.backward()
    assert not any(buffer.is_inference() for buffer in model.buffers())


def test_a_model_of_meta_trains_after_its_first_use() -> None:
    source, idx = model_of("ddl-cc"), tokens(2, 12)
    with torch.device("meta"):
        model = GPT(source.config)
    model.load_state_dict(source.state_dict(), assign=True)
    with torch.inference_mode():
        logits = model(idx).logits
    trained = model(idx, labels=idx)
    trained.loss.backward()
    assert torch.equal(trained.logits, logits)


def test_an_annealed_model_counts_after_it_was_moved() -> None:
    model = annealed({}, 1, of=4)
    annealing = model.transformer.h[0].anneal
    with torch.inference_mode():
        model._apply(torch.clone)  # as a move to another device does
    annealing.advance()
    assert int(annealing.step) == 2
