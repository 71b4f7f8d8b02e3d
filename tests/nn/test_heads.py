"""Residuals with several heads: each block of features has a rewrite of its own."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import ddl
from ddl import DeltaResidual, DeltaStream
from ddl.lab.analysis import spectra
from ddl.lab.config import GPTConfig
from ddl.models import GPT
from ddl.nn import History
from tests.support.helpers import assert_same_gradients, gradients, normal, randomise_
from tests.support.tolerances import assert_close

F64 = torch.float64
B, T, D, M, H = 2, 6, 12, 3, 4

OPTIONS: list[dict[str, Any]] = [
    {},
    {"erase": "none"},
    {"erase": "none", "normalize": False},
    {"erase": "separate", "branch_scale": 0.6},
    {"value": "sigmoid", "value_from": "compressed", "gate": "mlp"},
    {"value": "constant", "gate_from": "flatten"},
    {"gate_from": "pooled", "erase": "separate"},
]
every_option = pytest.mark.parametrize("options", OPTIONS, ids=str)


def make_stream(**options: Any) -> DeltaStream:
    torch.manual_seed(0)
    sublayers = [nn.Linear(D, D, bias=False) for _ in range(4)]
    stream = DeltaStream(D, sublayers, value_channels=M, heads=H, **options).double()
    randomise_(stream)
    return stream


def by_blocks(residual: DeltaResidual, x: Tensor, k: Tensor, value: Tensor, gate: Tensor) -> Tensor:
    """X' by the equation, one block after the other. value (…, H, m), gate (…, H) or (…, 2, H)."""
    after = []
    for h, block in enumerate(x.split(D // H, -2)):
        unit = k[..., h * (D // H) :][..., : D // H]
        if residual.normalize:
            unit = unit / (unit.square().sum(-1, keepdim=True) + residual.eps_k**2).sqrt()
        p = (unit.unsqueeze(-1) * block).sum(-2)
        beta = gate[..., h] if residual.erase != "separate" else gate[..., 0, h]
        alpha = {"tied": beta, "none": 0 * beta, "separate": gate[..., -1, h]}[residual.erase]
        written = beta.unsqueeze(-1) * value[..., h, :] - alpha.unsqueeze(-1) * p
        after.append(block + residual.branch_scale * unit.unsqueeze(-1) * written.unsqueeze(-2))
    return torch.cat(after, -2)


@every_option
def test_each_block_is_rewritten_by_itself(options: dict[str, Any]) -> None:
    residual = DeltaResidual(D, M, heads=H, **options).double()
    randomise_(residual)
    x, k, h = normal(B, T, D, M), normal(B, T, D, seed=1), normal(B, T, D, seed=2)
    raw, leaves = normal(B, T, D, seed=3), {}
    for name, leaf in {"x": x, "k": k, "h": h, "raw": raw}.items():
        leaves[name] = leaf.requires_grad_()
    value, gate = residual.value_and_gate(h, raw)
    value, gate = residual.fill_value_and_gate(x, h, value, gate)
    actual = residual(x, k, context=h, compressed=raw)
    expected = by_blocks(residual, x, k, value, gate)
    assert_close("state", actual, expected, F64)
    named, expected_named = (gradients(y, leaves, residual) for y in (actual, expected))
    unused = tuple(name for name in leaves if not expected_named[name].any())
    assert_same_gradients(named, expected_named, F64, may_vanish=unused)


def test_one_head_is_the_default_and_changes_no_bit() -> None:
    one, other = DeltaResidual(D, M), DeltaResidual(D, M, heads=1)
    other.load_state_dict(one.state_dict())
    x, k, h = (normal(*size, dtype=torch.float32) for size in ((B, T, D, M), (B, T, D), (B, T, D)))
    assert torch.equal(one(x, k, context=h), other(x, k, context=h))


def test_parameters_and_the_start() -> None:
    residual = DeltaResidual(D, M, heads=H)
    assert residual.eps_k == pytest.approx(0.02 * (D / H) ** 0.5)
    assert residual.gate.weight.shape == (H, D)
    assert residual.value is not None
    assert residual.value.weight.shape == (H * M, D)
    value, gate = residual.value_and_gate(torch.zeros(B, T, D), None)
    assert value is not None
    assert gate is not None
    assert (value.shape, gate.shape) == ((B, T, H, M), (B, T, H))
    assert (value == 1).all()
    assert (gate == 1).all()


@pytest.mark.parametrize("erase", ["tied", "separate"])
@pytest.mark.parametrize("value_from", ["context", "compressed"])
@torch.no_grad()
def test_an_edit_of_a_head_holds_for_cached_steps(erase: str, value_from: str) -> None:
    stream = make_stream(erase=erase, value_from=value_from, compress="token", kernel_size=3)
    x = normal(B, T, D)
    with ddl.edit(stream, sublayers="residuals.1.2", alpha=0.25, value=0.5):
        whole, history = stream(x), History()
        pieces = torch.cat([stream(part, history=history) for part in x.split(1, 1)], 1)
    torch.testing.assert_close(pieces, whole, rtol=0, atol=1e-12)
    assert not torch.allclose(stream(x), whole)


@torch.no_grad()
def test_closing_one_head_keeps_its_block() -> None:
    stream, x = make_stream(), normal(B, T, D)
    width = D // H
    with (
        ddl.edit(stream, sublayers="residuals.1.2", beta=0.0),
        ddl.record(stream, tokens=("state", "state_after")) as recording,
    ):
        stream(x)
    before, after = recording.tokens("state")[H], recording.tokens("state_after")[2 * H - 1]
    kept = torch.zeros(D, dtype=torch.bool)
    kept[2 * width : 3 * width] = True
    assert torch.equal(before[..., kept, :], after[..., kept, :])
    assert (before[..., ~kept, :] != after[..., ~kept, :]).all()


@pytest.mark.parametrize("options", OPTIONS[:4], ids=str)
@torch.no_grad()
def test_a_recording_has_each_head_as_a_rewrite_of_the_whole_state(options: Any) -> None:
    stream, x = make_stream(**options), normal(B, T, D)
    names = ("direction", "beta", "alpha", "value", "state", "state_after", "coherence")
    with ddl.record(stream, tokens=names) as recording:
        stream(x)
    assert recording.sublayers == [f"residuals.{i}.{j}" for i in range(4) for j in range(H)]
    found = {name: recording.tokens(name) for name in names}
    k, X, s = found["direction"], found["state"], options.get("branch_scale", 1.0)
    for row in range(4 * H):
        outside = torch.ones(D, dtype=torch.bool)
        outside[row % H * (D // H) :][: D // H] = False
        assert not k[row][..., outside].any()
        p = (k[row].unsqueeze(-1) * X[row]).sum(-2)
        written = found["beta"][row].unsqueeze(-1) * found["value"][row]
        written = s * (written - found["alpha"][row].unsqueeze(-1) * p)
        after = X[row] + k[row].unsqueeze(-1) * written.unsqueeze(-2)
        assert_close("state_after", found["state_after"][row], after, F64)
    assert len(found["coherence"]) == 4 * H - H
    cosines = torch.cosine_similarity(k[H:], k[:-H], dim=-1)
    assert_close("coherence", found["coherence"], cosines, F64)
    assert not torch.equal(X[1], X[0])


@pytest.mark.parametrize("erase", ["tied", "separate"])
@torch.no_grad()
def test_spectra_and_survival_are_those_of_the_block_diagonal_operators(erase: str) -> None:
    stream, x = make_stream(erase=erase), normal(B, T, D)
    names = ("direction", "beta", "alpha", "value", "state", "state_after")
    with ddl.record(stream, tokens=names) as recording:
        stream(x)
    k, beta, alpha, v, X, after = (
        recording.tokens(name).flatten(1, 2).transpose(0, 1).numpy() for name in names
    )
    token, L = 3, 4 * H
    product = np.eye(D)
    for row in range(L):
        product -= alpha[token, row] * np.outer(k[token, row], k[token, row] @ product)
    expected = np.linalg.svd(product, compute_uv=False)
    np.testing.assert_allclose(
        spectra.product_singular_values(k, alpha)[token], expected[: min(L, D)], atol=1e-12
    )
    left = spectra.write_survival(k, beta, v, X[:, 0], erase=alpha)
    np.testing.assert_allclose(left.shares.sum(1), 1)
    embedding = np.linalg.norm(product @ X[token, 0])
    np.testing.assert_allclose(left.norms[token, L, 0], embedding)
    rest = after[token, -1] - product @ X[token, 0]
    writes = left.shares[token, 1:].sum() * np.square(after[token, -1]).sum()
    np.testing.assert_allclose(writes, (rest * after[token, -1]).sum())


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("stream_dtype", [None, "bfloat16"])
@torch.no_grad()
def test_under_autocast_the_stream_is_the_loop(options: dict[str, Any], stream_dtype: Any) -> None:
    stream = make_stream(**options, stream_dtype=stream_dtype, compress="token").float()
    x = normal(B, T, D, dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        state = stream.expand(x.to(torch.bfloat16) if stream_dtype else x)
        for read, sublayer, residual in zip(
            stream.reads, stream.sublayers, stream.residuals, strict=True
        ):
            h, raw = read(state, return_compressed=True)
            state = residual(state, sublayer(h), context=h, compressed=raw)
        assert torch.equal(stream(x), stream.readout(state))


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"heads": 5}, "`heads` must divide the hidden size of 12, got 5"),
        ({"heads": 0}, "`heads` must be an integer of at least 1, got 0"),
        ({"heads": "2"}, "`heads` must be an integer of at least 1, got '2'"),
        ({"heads": 2, "rewrites": 2}, "`rewrites` must be 1 with several heads, got 2"),
        ({"heads": 2, "mapping": "v"}, '`heads` must be left at 1 unless mapping="k", got 2'),
        ({"heads": 2, "anchor_every": 4}, "`anchor_every` must be 1 with several heads, got 4"),
    ],
)
def test_options_that_do_not_fit_are_refused(options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=re.escape(sentence)):
        GPTConfig(hidden_size=12, num_heads=2, **options)
    with pytest.raises(ValueError, match=re.escape(sentence)):
        DeltaStream(12, [nn.Identity()], value_channels=2, **options)


@pytest.mark.parametrize("residual", ["ddl", "ddl-cc", "ddl-tc"])
def test_a_model_trains_and_generates(residual: str) -> None:
    config = GPTConfig(
        residual=residual,
        vocab_size=32,
        block_size=16,
        num_layers=2,
        num_heads=2,
        hidden_size=32,
        heads=8,
    )
    model, idx = GPT(config), torch.arange(24).view(2, 12)
    model(idx, labels=idx).loss.backward()
    assert all(p.grad is not None for p in model.parameters())
    assert model.generate(idx[:, :4], 3, temperature=0).shape == (2, 7)
