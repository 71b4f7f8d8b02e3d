"""`ddl.record` of models without rewrites: what it sees equals the equations, in float64."""

from __future__ import annotations

import copy
import itertools
from typing import NamedTuple

import pytest
import torch
from torch import Tensor, nn

import ddl
from ddl.models import GPT
from ddl.models.config import BASELINES
from ddl.models.streams.attention_residual import AttentionResidualStream, attend
from ddl.models.streams.connected import ConnectedStream
from ddl.models.streams.controls import ConvolvedStream, ExpandedStream
from ddl.recording import ADDED, KEPT
from tests.support import hf_cases
from tests.support.helpers import randomise_

F64 = torch.float64
plain = pytest.mark.parametrize("residual", BASELINES)


class Step(NamedTuple):
    """X' = X M + F bᵀ of one sublayer."""

    state: Tensor
    written: Tensor
    mix: Tensor
    join: Tensor
    after: Tensor


def make(residual: str) -> GPT:
    model = hf_cases.model(residual=residual).double().eval()
    randomise_(model.trunk, std=0.4)
    return model


@torch.no_grad()
def by_hand(model: GPT, idx: Tensor) -> list[Step]:
    """Every sublayer's step; hyper-connections by the equations of their paper."""
    trunk, x = model.trunk, model.wte(idx)
    if isinstance(trunk, AttentionResidualStream):
        return by_attention(trunk, x)
    n = trunk.streams if isinstance(trunk, ConnectedStream) else 1
    n = trunk.value_channels if isinstance(trunk, ExpandedStream) else n
    X, steps = x[..., None].expand(*x.shape, n), []
    for i, sublayer in enumerate(trunk.sublayers):
        normed = isinstance(trunk, ConvolvedStream | ExpandedStream)
        norm = nn.Identity() if normed else trunk.norms[i]
        if isinstance(trunk, ConvolvedStream):
            read = trunk.reads[i](X[..., 0])
            mix, join = torch.eye(1, dtype=F64), torch.ones(1, dtype=F64)
        elif isinstance(trunk, ExpandedStream):
            read, part = trunk.reads[i](X), trunk.residuals[i]
            beta = 2 * torch.sigmoid(read @ part.gate.weight.T + part.gate.bias)
            join = beta * (read @ part.value.weight.T + part.value.bias)
            mix = torch.eye(n, dtype=F64)
        elif model.config.residual in ("mhc", "independent-hc", "gated"):
            read, _, join, mix = trunk.connections[i](X.transpose(-1, -2))
            mix = torch.eye(n, dtype=F64) if mix is None else mix
        elif isinstance(trunk, ConnectedStream):
            c = trunk.connections[i]
            h = c.norm(X.transpose(-1, -2))
            A = c.mix + c.mix_scale * torch.tanh(h @ c.mix_map.weight.T)
            join = c.join + c.join_scale * torch.tanh(h @ c.join_map.weight.T)[..., 0]
            read, mix = (X @ A[..., :1])[..., 0], A[..., 1:]
        else:
            read, mix, join = X[..., 0], torch.eye(1, dtype=F64), torch.ones(1, dtype=F64)
        F = sublayer(norm(read))
        join = join.expand(*F.shape[:-1], n)
        mix = mix.expand(*F.shape[:-1], n, n)
        after = X @ mix + F[..., None] * join[..., None, :]
        steps.append(Step(X, F, mix, join, after))
        X = after
    return steps


@torch.no_grad()
def by_attention(trunk: AttentionResidualStream, x: Tensor) -> list[Step]:
    """Every sublayer's addition to the sum of its block, among the sums of all four outputs."""
    X, steps, read = torch.stack([x, *[torch.zeros_like(x)] * 4], -1), [], x
    for i, (norm, sublayer) in enumerate(zip(trunk.norms, trunk.sublayers, strict=True)):
        F = sublayer(norm(read))
        join = torch.eye(5, dtype=F64)[i + 1].expand(*F.shape[:-1], 5)
        after = X + F[..., None] * join[..., None, :]
        mix = torch.eye(5, dtype=F64).expand(*F.shape[:-1], 5, 5)
        steps.append(Step(X, F, mix, join, after))
        X = after
        read = attend(list(X[..., : i + 2].unbind(-1)), trunk.queries[i], trunk.norm_eps)
    return steps


def expected(steps: list[Step]) -> dict[str, Tensor]:
    """Every quantity (L, B, T, …); coherence from the second sublayer on."""
    cosines = [
        (b.written * a.written).sum(-1) / (b.written.norm(dim=-1) * a.written.norm(dim=-1))
        for a, b in itertools.pairwise(steps)
    ]
    added = [s.written[..., None] * s.join[..., None, :] for s in steps]
    return {
        "write_norm": torch.stack([each.flatten(-2).norm(dim=-1) for each in added]),
        "state_norm": torch.stack([s.state.flatten(-2).norm(dim=-1) for s in steps]),
        "state_norm_after": torch.stack([s.after.flatten(-2).norm(dim=-1) for s in steps]),
        "channel_norm": torch.stack([s.state.norm(dim=-2) for s in steps]),
        "channel_norm_after": torch.stack([s.after.norm(dim=-2) for s in steps]),
        "coherence": torch.stack(cosines),
        "direction": torch.stack([s.written / s.written.norm(dim=-1, keepdim=True) for s in steps]),
        "state": torch.stack([s.state for s in steps]),
        "state_after": torch.stack([s.after for s in steps]),
    }


@plain
def test_every_quantity_is_that_of_the_equations(residual: str) -> None:
    model, idx = make(residual), hf_cases.tokens(2, 5)
    with ddl.record(model, tokens=(*ADDED, *KEPT)) as recording:
        model(idx)
    assert recording.sublayers == [f"trunk.sublayers.{i}" for i in range(4)]
    assert recording.quantities == tuple(ADDED)
    assert len(recording) == 10
    wanted = expected(by_hand(model, idx))
    assert set(wanted) == {*ADDED, *KEPT}
    for name, values in wanted.items():
        got = recording.tokens(name)
        torch.testing.assert_close(got, values, rtol=1e-10, atol=1e-10, msg=name)
    mean = recording.statistics("write_norm").mean
    torch.testing.assert_close(mean, wanted["write_norm"].flatten(1).mean(1))


@plain
def test_it_changes_nothing_and_leaves_padding_out(residual: str) -> None:
    model, idx = make(residual), hf_cases.tokens(2, 6)
    mask = torch.ones(2, 6, dtype=torch.bool)
    mask[0, :2] = False
    before = model(idx, attention_mask=mask).logits
    with ddl.record(model) as recording:
        inside = model(idx, attention_mask=mask).logits
        saved = copy.deepcopy(model)
    assert torch.equal(inside, before)
    assert len(recording) == 10  # of 12 tokens
    assert saved.trunk.hooks == model.trunk.hooks == ()


def test_what_an_additive_model_lacks_is_refused() -> None:
    model = make("additive")
    names = ", ".join([*ADDED, *KEPT])
    with (
        pytest.raises(ValueError, match=f"^`tokens` must be among {names}, got 'beta'$"),
        ddl.record(model, tokens="beta"),
    ):
        pass
    with ddl.record(model) as recording:
        model(hf_cases.tokens(1, 4))
    with pytest.raises(ValueError, match=f"^`quantity` must be one of {', '.join(ADDED)}, got"):
        recording.statistics("beta")
    for ask in (recording.regimes, recording.eigenvalue_counts):
        with pytest.raises(ValueError, match=r"^the model must have rewrites, which have eigenv"):
            ask()
    (first, *_) = recording.summary()["sublayers"]
    assert set(first) == {"name", *ADDED}
    with (
        pytest.raises(ValueError, match=r"^`model` must have a DeltaResidual, got a GPT without$"),
        ddl.edit(model, beta=0.0),
    ):
        pass


def test_hugging_face_and_a_compiled_model() -> None:
    from ddl.hf.modeling import from_gpt

    gpt, idx = make("additive"), hf_cases.tokens(1, 4)
    means = []
    for model in (gpt, from_gpt(gpt), torch.compile(gpt, backend="eager")):
        with ddl.record(model) as recording, torch.no_grad():
            model(idx)
        means.append(recording.statistics("write_norm").mean)
    assert torch.equal(means[0], means[1])
    assert torch.equal(means[0], means[2])
