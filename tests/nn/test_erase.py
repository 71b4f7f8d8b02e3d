"""Residuals that erase nothing, or by a gate of their own: the modules, beside the delta rule."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import nn

import ddl
from ddl import DeltaResidual, DeltaStream, reference
from ddl.lab.config import GPTConfig
from ddl.models import GPT
from ddl.nn import History
from tests.support.helpers import normal, randomise_
from tests.support.tolerances import assert_close

F64 = torch.float64
B, T, D, M = 2, 6, 12, 3


def make_stream(**options: Any) -> DeltaStream:
    torch.manual_seed(0)
    sublayers = [nn.Linear(D, D, bias=False) for _ in range(4)]
    return DeltaStream(D, sublayers, value_channels=M, **options).double()


@pytest.mark.parametrize("options", [{}, {"gate": "mlp"}, {"rewrites": 2}, {"beta_init": 0.4}])
def test_a_fresh_separate_gate_computes_what_tied_computes(options: dict[str, Any]) -> None:
    tied, apart = make_stream(**options), make_stream(**options, erase="separate")
    shared = {n: p for n, p in tied.state_dict().items() if ".gate." not in n or "gate.0" in n}
    apart.load_state_dict(shared, strict=False)
    x = normal(B, T, D)
    assert_close("readout", apart(x), tied(x), F64, depth=4)


@pytest.mark.parametrize(("options", "inputs"), [({}, D), ({"gate": "mlp"}, 128)])
def test_it_has_the_parameters_of_one_more_gate(options: dict[str, Any], inputs: int) -> None:
    count = lambda module: sum(p.numel() for p in module.parameters())  # noqa: E731
    tied, apart = (DeltaResidual(D, M, erase=e, **options) for e in ("tied", "separate"))
    assert count(apart) - count(tied) == inputs + 1
    assert count(DeltaResidual(D, M, erase="none", **options)) == count(tied)


@pytest.mark.parametrize("normalize", [True, False])
def test_none_only_adds(normalize: bool) -> None:
    residual = DeltaResidual(D, M, erase="none", normalize=normalize).double()
    randomise_(residual)
    x, k, h = normal(B, T, D, M), normal(B, T, D, seed=1), normal(B, T, D, seed=2)
    value, gate = residual.value_and_gate(h, None)
    unit = k if not normalize else k / (k.square().sum(-1, keepdim=True) + residual.eps_k**2).sqrt()
    expected = x + gate[..., None, None] * unit[..., None] * value[..., None, :]
    assert_close("state", residual(x, k, context=h), expected, F64)
    assert (residual.eps_k is None) == (not normalize)


@pytest.mark.parametrize("erase", ["tied", "none", "separate"])
def test_a_branch_scale_scales_what_changes(erase: str) -> None:
    whole, part = (DeltaResidual(D, M, erase=erase, branch_scale=s).double() for s in (1.0, 0.3))
    randomise_(whole)
    part.load_state_dict(dict(whole.state_dict()))
    assert whole.state_dict().keys() == part.state_dict().keys()
    x, k, h = normal(B, T, D, M), normal(B, T, D, seed=1), normal(B, T, D, seed=2)
    changed = whole(x, k, context=h) - x
    assert_close("state", part(x, k, context=h), x + 0.3 * changed, F64)


def test_an_edit_of_alpha_erases_apart_from_what_is_written() -> None:
    tied, none = make_stream(), make_stream(erase="none")
    randomise_(tied)
    none.load_state_dict(dict(tied.state_dict()))
    x = normal(B, T, D)
    with torch.no_grad(), ddl.edit(tied, alpha=0.0), ddl.record(tied, tokens="alpha") as recording:
        assert_close("readout", tied(x), none(x), F64, depth=4)
    assert not recording.tokens("alpha").any()
    with torch.no_grad(), ddl.edit(tied, sublayers=2, tokens=[1], alpha=0.0, beta=0.0):
        whole = tied(x)
    with torch.no_grad(), ddl.edit(tied, sublayers=2, tokens=[1], beta=0.0):
        assert_close("readout", tied(x), whole, F64, depth=4)


@pytest.mark.parametrize("rewrites", [1, 2])
def test_an_edit_of_one_alpha_has_gradients(rewrites: int) -> None:
    """Those of every state stored: a chain begins anew where a rewrite erases otherwise."""
    found = []
    for anchor_every in (1, 4):
        stream, x = make_stream(anchor_every=anchor_every, rewrites=rewrites), normal(B, T, D)
        randomise_(stream)
        alpha = torch.tensor(0.25, dtype=F64, requires_grad=True)
        with ddl.edit(stream, sublayers=1, alpha=alpha):
            loss = stream(x.requires_grad_()).square().sum()
        found.append(torch.autograd.grad(loss, [x, alpha, *stream.parameters()]))
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("erase", ["tied", "none", "separate"])
@pytest.mark.parametrize("rewrites", [1, 2])
@torch.no_grad()
def test_an_edit_of_alpha_holds_for_cached_steps(erase: str, rewrites: int) -> None:
    stream, x = make_stream(erase=erase, rewrites=rewrites), normal(B, T, D)
    randomise_(stream)
    with ddl.edit(stream, sublayers=1, alpha=0.25):
        whole, history = stream(x), History()
        pieces = torch.cat([stream(part, history=history) for part in x.split(1, 1)], 1)
    torch.testing.assert_close(pieces, whole, rtol=0, atol=1e-12)
    assert not torch.allclose(stream(x), whole)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"erase": "some"}, '`erase` must be "tied" or "none" or "separate", got \'some\''),
        ({"normalize": False}, '`normalize` must be left at True unless erase="none", got False'),
        (
            {"erase": "none", "normalize": False, "eps_k": 0.1},
            "`eps_k` must be left at None with normalize=False, got 0.1",
        ),
        ({"branch_scale": float("inf")}, "`branch_scale` must be a finite number, got inf"),
    ],
)
def test_options_that_do_not_fit_are_refused(options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=re.escape(sentence)):
        DeltaResidual(D, M, **options)
    with pytest.raises(ValueError, match=re.escape(sentence)):
        GPTConfig(residual="ddl-cc", **options)


def test_the_gate_that_a_residual_lacks_cannot_be_edited() -> None:
    stream = make_stream(erase="none", normalize=False)
    sentence = "`alpha` must be None for residuals with normalize=False, got a gate"
    with pytest.raises(ValueError, match=re.escape(sentence)), ddl.edit(stream, alpha=0.5):
        pass


@pytest.mark.parametrize("erase", ["tied", "none", "separate"])
def test_a_model_trains_and_generates(erase: str) -> None:
    config = GPTConfig(
        vocab_size=32, block_size=16, num_layers=2, num_heads=2, hidden_size=32, erase=erase
    )
    model, idx = GPT(config), torch.arange(24).view(2, 12)
    model(idx, labels=idx).loss.backward()
    assert all(p.grad is not None for p in model.parameters())
    assert model.generate(idx[:, :4], 3, temperature=0).shape == (2, 7)


def test_the_reference_is_the_same_formula() -> None:
    x, k, v = normal(B, T, D, M), normal(B, T, D, seed=1), normal(B, T, M, seed=2)
    beta, alpha = normal(B, T, seed=3).abs(), normal(B, T, seed=4).abs()
    unit = k / (k.square().sum(-1, keepdim=True) + 0.01).sqrt()
    p = torch.einsum("btd,btdm->btm", unit, x)
    written = beta[..., None] * v - alpha[..., None] * p
    got = reference.rewrite(x, k, v, beta, eps_k=0.1, erase=alpha)
    assert_close("state", got, x + unit[..., None] * written[..., None, :], F64)
