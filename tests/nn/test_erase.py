"""Residuals that erase nothing: the modules, beside the delta rule."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

from ddl import DeltaResidual
from ddl.lab.config import GPTConfig
from ddl.models import GPT
from tests.support.helpers import normal, randomise_
from tests.support.tolerances import assert_close

F64 = torch.float64
B, T, D, M = 2, 6, 12, 3


def test_none_only_adds() -> None:
    residual = DeltaResidual(D, M, erase="none").double()
    randomise_(residual)
    x, k, h = normal(B, T, D, M), normal(B, T, D, seed=1), normal(B, T, D, seed=2)
    value, gate = residual.value_and_gate(h, None)
    unit = k / (k.square().sum(-1, keepdim=True) + residual.eps_k**2).sqrt()
    expected = x + gate[..., None, None] * unit[..., None] * value[..., None, :]
    assert_close("state", residual(x, k, context=h), expected, F64)


@pytest.mark.parametrize("erase", ["tied", "none"])
def test_a_branch_scale_scales_what_changes(erase: str) -> None:
    whole, part = (DeltaResidual(D, M, erase=erase, branch_scale=s).double() for s in (1.0, 0.3))
    randomise_(whole)
    part.load_state_dict(dict(whole.state_dict()))
    assert whole.state_dict().keys() == part.state_dict().keys()
    x, k, h = normal(B, T, D, M), normal(B, T, D, seed=1), normal(B, T, D, seed=2)
    changed = whole(x, k, context=h) - x
    assert_close("state", part(x, k, context=h), x + 0.3 * changed, F64)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"erase": "separate"}, '`erase` must be "tied" or "none", got \'separate\''),
        ({"branch_scale": float("inf")}, "`branch_scale` must be a finite number, got inf"),
    ],
)
def test_options_that_do_not_fit_are_refused(options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=re.escape(sentence)):
        DeltaResidual(D, M, **options)
    with pytest.raises(ValueError, match=re.escape(sentence)):
        GPTConfig(residual="ddl-cc", **options)


@pytest.mark.parametrize("erase", ["tied", "none"])
def test_a_model_trains_and_generates(erase: str) -> None:
    config = GPTConfig(
        vocab_size=32, block_size=16, num_layers=2, num_heads=2, hidden_size=32, erase=erase
    )
    model, idx = GPT(config), torch.arange(24).view(2, 12)
    model(idx, labels=idx).loss.backward()
    assert all(p.grad is not None for p in model.parameters())
    assert model.generate(idx[:, :4], 3, temperature=0).shape == (2, 7)
