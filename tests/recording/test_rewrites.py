"""Recording and editing sublayers that rewrite several times: each rewrite has a row of its own."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

import ddl
from ddl import reference
from ddl.models import GPT, GPTConfig
from ddl.recording import KEPT, QUANTITIES, lens
from tests.support.recording_cases import F64, B, D, L, Rewrite, T, embeddings, make

N = 2
OPTIONS = {"value_channels": 3, "rewrites": N}
NAMES = [f"residuals.{i}.{j}" for i in range(L) for j in range(N)]
SEEN = ("beta", "value")


@torch.no_grad()
def singles(stream: ddl.DeltaStream, x: Tensor) -> Iterator[tuple[Rewrite, float]]:
    """Every rewrite by the equations, and its ε_k."""
    X = stream.expand(x)
    for read, sublayer, residual in zip(
        stream.reads, stream.sublayers, stream.residuals, strict=True
    ):
        h = read(X)
        found = residual.write(X, sublayer(h), h, *residual.value_and_gate(h, None))
        directions, values, gates, *_ = found
        for j in range(N):
            k, v, beta = directions[..., j, :], values[..., j, :], gates[..., j]
            after = reference.rewrite(X, k, v, beta, eps_k=residual.eps_k)
            yield Rewrite(X, k, v, beta, beta, after), residual.eps_k
            X = after


def test_every_rewrite_has_a_row() -> None:
    stream, x = make(OPTIONS), embeddings()
    with ddl.record(stream, tokens=(*QUANTITIES, *KEPT)) as recording:
        readout = stream(x)
    assert recording.sublayers == NAMES
    assert len(recording) == B * T
    rows = list(singles(stream, x))
    previous = None
    for row, (rewrite, eps_k) in enumerate(rows):
        unit = rewrite.direction / (rewrite.direction.square().sum(-1, True) + eps_k**2).sqrt()
        expected = {
            "beta": rewrite.gate,
            "value": rewrite.value,
            "readout": torch.einsum("btd,btdm->btm", unit, rewrite.state),
            "direction": unit,
            "state": rewrite.state,
            "state_after": rewrite.after,
            "eigenvalue": reference.determinant(rewrite.direction, rewrite.gate, eps_k),
        }
        for name, wanted in expected.items():
            torch.testing.assert_close(recording.tokens(name)[row], wanted, msg=name)
        if previous is not None:
            cosine = torch.cosine_similarity(unit, previous, dim=-1)
            torch.testing.assert_close(recording.tokens("coherence")[row - 1], cosine)
        previous = unit
    torch.testing.assert_close(readout, stream.readout(rows[-1][0].after))


def test_recording_changes_no_bit() -> None:
    stream, x = make(OPTIONS, torch.float32), embeddings(dtype=torch.float32)
    plain = stream(x)
    with ddl.record(stream):
        assert torch.equal(stream(x), plain)


@pytest.mark.parametrize(
    ("sublayers", "rows"),
    [
        (None, range(L * N)),
        (3, [3]),
        (-1, [L * N - 1]),
        ("residuals.1", [2, 3]),
        ("residuals.1.0", [2]),
        (["residuals.0", 5], [0, 1, 5]),
        ([2, "residuals.1.1"], [2, 3]),
    ],
)
def test_chosen_rewrites_are_edited(sublayers, rows) -> None:
    stream, x = make(OPTIONS), embeddings()
    beta = torch.linspace(0.1, 1.9, B * T, dtype=F64).view(B, T)
    value = torch.randn(B, T, 3, dtype=F64)
    with (
        ddl.edit(stream, sublayers=sublayers, beta=beta, value=value),
        ddl.record(stream, tokens=SEEN) as recording,
    ):
        stream(x)
    gates, values = recording.tokens("beta"), recording.tokens("value")
    for row in range(L * N):
        assert torch.equal(gates[row], beta) == (row in rows)
        assert torch.equal(values[row], value) == (row in rows)


def test_positions_are_those_of_tokens() -> None:
    stream, x = make(OPTIONS), embeddings()
    with (
        ddl.edit(stream, sublayers=2, tokens=[1, 3], beta=0.0),
        ddl.record(stream, tokens=("beta", "state", "state_after")) as recording,
    ):
        stream(x)
    shut = recording.tokens("beta") == 0
    assert shut[2].all(0).tolist() == [False, True, False, True, False]
    assert not shut[[0, 1, *range(3, L * N)]].any()
    before, after = recording.tokens("state")[2], recording.tokens("state_after")[2]
    assert torch.equal(before[:, [1, 3]], after[:, [1, 3]])


def test_names_and_numbers_that_are_not_there_are_refused() -> None:
    stream = make(OPTIONS)
    for which in (L * N, "residuals.0.2"):
        with (
            pytest.raises(ValueError, match=f"must be below {L * N} or among the names resid"),
            ddl.edit(stream, sublayers=which, beta=0.0),
        ):
            pass


def test_the_lens_has_a_row_for_each_sublayer() -> None:
    config = GPTConfig(
        vocab_size=17, block_size=8, num_layers=2, num_heads=2, hidden_size=D, rewrites=N
    )
    found = lens(GPT(config), torch.randint(17, (1, 8)))
    assert found.sublayers == ["embedding", *(f"trunk.residuals.{i}" for i in range(4))]
