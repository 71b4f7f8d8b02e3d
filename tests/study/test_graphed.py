"""The work of a step as a CUDA graph, called without one; tests/gpu/test_graphed.py has graphs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from study import graphed


def test_a_graphed_step_scales_the_rates_of_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of mup, whose groups have rates of their own."""

    class Called:
        def __init__(self, work: Any, device: torch.device) -> None:
            self.work = work

        def __call__(self, tokens: torch.Tensor) -> Any:
            return self.work(tokens)

    monkeypatch.setattr(graphed, "Graphed", Called)
    first, second = nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(1))
    groups = [{"params": [first]}, {"params": [second], "lr_scale": 0.25}]
    optimizer: Any = torch.optim.SGD(groups, lr=1.0)
    step = graphed.GraphedStep(optimizer, lambda tokens: tokens.sum() * (first + second).sum(), 1e9)
    for lr in (1.0, 0.5):
        step(torch.ones(2), lr)
    assert first.item() == pytest.approx(-2 * (1.0 + 0.5))
    assert second.item() == pytest.approx(-2 * (1.0 + 0.5) / 4)
    assert [group["lr"] for group in optimizer.param_groups] == [0.5, 0.125]
