"""Drawing a token: temperature, the k likeliest, and the nucleus of probability p."""

from __future__ import annotations

import math
from itertools import product

import pytest
import torch

from ddl.models.sampling import Sampling
from tests.support.helpers import normal

SIZE, DRAWS = 12, 20_000


def by_hand(
    logits: list[float], temperature: float, top_k: int | None, top_p: float | None
) -> dict[int, float]:
    """Probability of each token that may be drawn, in float64."""
    order = sorted(range(len(logits)), key=lambda token: -logits[token])[:top_k]
    weights = {token: math.exp(logits[token] / temperature) for token in order}
    total = sum(weights.values())
    kept: dict[int, float] = {}
    for token in order:
        if top_p is not None and sum(kept.values()) >= top_p:
            break
        kept[token] = weights[token] / total
    return {token: share / sum(kept.values()) for token, share in kept.items()}


def draws(logits: torch.Tensor, count: int = DRAWS, **options: float | None) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return Sampling(generator=generator, **options).draw(logits.expand(count, -1))[:, 0]


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p"),
    [*product((0.5, 1.0, 2.0), (None, 4), (None, 0.1, 0.6, 0.95, 1.0))],
)
def test_the_tokens_and_their_frequencies(
    temperature: float, top_k: int | None, top_p: float | None
) -> None:
    logits = normal(1, SIZE, dtype=torch.float32)
    expected = by_hand(logits[0].double().tolist(), temperature, top_k, top_p)
    found = draws(logits, temperature=temperature, top_k=top_k, top_p=top_p)
    assert set(found.tolist()) <= set(expected)
    for token, share in expected.items():
        frequency = (found == token).double().mean().item()
        assert abs(frequency - share) < 5 * math.sqrt(share * (1 - share) / DRAWS) + 1e-9


def test_the_set_is_the_smallest_that_reaches_p() -> None:
    """Probabilities 1/2, 1/4, 1/8, 1/8 are exact, so their sums may be equal to p."""
    logits = torch.tensor([[0.25, 0.5, 0.125, 0.125]]).log2() * math.log(2)
    for top_p, kept in ((0.01, {1}), (0.5, {1}), (0.51, {1, 0}), (0.75, {1, 0}), (0.8, {1, 0, 2})):
        assert set(draws(logits, 500, top_p=top_p).tolist()) == kept, top_p
    assert set(draws(logits, 500, top_p=0.99).tolist()) == {0, 1, 2, 3}


def test_every_row_has_a_set_of_its_own() -> None:
    logits = torch.tensor([[9.0, 0.0, 0.0, 0.0], [0.0, 0.0, 0.0, 0.0], [0.0, 0.0, 9.0, 9.0]])
    found = {row: set() for row in range(3)}
    generator = torch.Generator().manual_seed(0)
    for _ in range(200):
        drawn = Sampling(top_p=0.9, generator=generator).draw(logits)
        for row in range(3):
            found[row].add(drawn[row].item())
    assert found == {0: {0}, 1: {0, 1, 2, 3}, 2: {2, 3}}


def test_all_probability_drops_no_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sums in float32 reach 1 before the last token."""
    given: list[torch.Tensor] = []
    multinomial = torch.multinomial

    def seen(probabilities: torch.Tensor, *args: object, **options: object) -> torch.Tensor:
        given.append(probabilities)
        return multinomial(probabilities, *args, **options)

    monkeypatch.setattr(torch, "multinomial", seen)
    logits = torch.linspace(-60, 0, 50_304)[None]
    assert torch.equal(draws(logits, 3, top_p=1.0), draws(logits, 3))
    assert torch.equal(*given)
    assert (given[0] > 0).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_other_dtypes_and_the_greedy_token(dtype: torch.dtype) -> None:
    logits = normal(1, SIZE, dtype=torch.float32).to(dtype)
    best = logits.argmax().item()
    assert set(draws(logits, 50, top_p=1e-9).tolist()) == {best}
    assert set(draws(logits, 50, top_p=0.9, temperature=0).tolist()) == {best}


@pytest.mark.parametrize("options", [{}, {"top_k": 6}, {"top_p": 0.9}, {"temperature": 0}], ids=str)
def test_padding_of_the_vocabulary_is_never_drawn(options: dict[str, float]) -> None:
    """It is as if the model had the first tokens alone, though the others are likelier."""
    logits = normal(1, SIZE, dtype=torch.float32)
    logits[:, 8:] += 50
    found = draws(logits, 2000, vocabulary=8, **options)
    assert torch.equal(found, draws(logits[:, :8], 2000, **options))
