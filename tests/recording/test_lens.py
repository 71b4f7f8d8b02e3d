"""The stream lens: final read and head after every sublayer."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ddl import record
from ddl.lab.config import RESIDUALS
from ddl.models import GPT
from ddl.recording import lens
from tests.support import hf_cases, nanogpt_cases
from tests.support.recording_cases import make


def likeliest(logits: torch.Tensor, top: int) -> tuple[torch.Tensor, torch.Tensor]:
    found = logits.softmax(-1).topk(top)
    return found.values, found.indices


def check(model: Any, idx: torch.Tensor, logits: torch.Tensor) -> None:
    """The last row is what the model says; every row is its final read and head of that state."""
    with record(model, tokens=("state", "state_after")) as recording:
        model(idx)
    states = torch.cat([recording.tokens("state")[:1], recording.tokens("state_after")])
    found = lens(model, idx, top=3)
    values, indices = likeliest(logits, 3)
    torch.testing.assert_close(found.probabilities[-1].to(values), values)
    assert torch.equal(found.tokens[-1], indices)
    assert found.sublayers == ["embedding", *recording.sublayers]
    for row, state in enumerate(states):
        of_state = model.logits_of_state(state)
        torch.testing.assert_close(found.probabilities[row].to(of_state), likeliest(of_state, 3)[0])
        for channel in range(state.shape[-1]):
            alone = torch.zeros_like(state)
            alone[..., channel] = state[..., channel]
            wanted = likeliest(model.logits_of_state(alone), 3)[0]
            got = found.channel_probabilities[row, channel]
            torch.testing.assert_close(got.to(wanted), wanted)


@pytest.mark.parametrize("residual", RESIDUALS)
def test_our_models(residual: str) -> None:
    model: GPT = hf_cases.model(residual=residual).eval()
    idx = hf_cases.tokens(2, 5)
    with torch.no_grad():
        check(model, idx, model(idx).logits)


@pytest.mark.parametrize("residual", ["ddl-cc", "additive"])
def test_hugging_face(residual: str) -> None:
    from ddl.hf.modeling import from_gpt

    model, idx = from_gpt(hf_cases.model(residual=residual)).eval(), hf_cases.tokens(2, 5)
    with torch.no_grad():
        check(model, idx, model(idx).logits)


@nanogpt_cases.variants
def test_nanogpt(options: dict[str, Any]) -> None:
    model = nanogpt_cases.make_delta(options).eval()
    idx, targets = nanogpt_cases.tokens()
    with torch.no_grad():
        check(model, idx, model(idx, targets)[0])  # with targets it returns all logits


def test_one_value_channel_is_the_whole_stream() -> None:
    found = lens(hf_cases.model(residual="ddl"), hf_cases.tokens(1, 4))
    assert torch.equal(found.channel_tokens[:, 0], found.tokens)


def test_a_model_in_training_stays_in_training() -> None:
    model = hf_cases.model(residual="ddl").train()
    lens(model, hf_cases.tokens(1, 4))
    assert model.training


def test_refused() -> None:
    idx = hf_cases.tokens(1, 4)
    plain = torch.nn.Linear(2, 2)
    plain.logits_of_state = lambda state: state  # type: ignore[assignment]
    with pytest.raises(ValueError, match="`model` must have a DeltaResidual or a stream of ddl's"):
        lens(plain, idx)
    with pytest.raises(
        TypeError, match=r"must have a method logits_of_state\(state\), got a Delta"
    ):
        lens(make({}), idx)


@pytest.mark.parametrize("top", [0, -1, True, 1.5])
def test_the_number_of_tokens_is_refused(top: Any) -> None:
    with pytest.raises(ValueError, match=f"^`top` must be an integer of at least 1, got {top}$"):
        lens(torch.nn.Linear(2, 2), torch.zeros(1, 1, dtype=torch.long), top=top)
