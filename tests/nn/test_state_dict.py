"""State dicts of other options than a residual's, which no name and no shape shows."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch
from torch import nn

from ddl import DeltaResidual, DeltaStream

D, M = 12, 3
OTHERS = [
    (
        {},
        {"erase": "none"},
        "`erase` must be 'tied', as when this state dict was saved, got 'none'",
    ),
    (
        {"branch_scale": 0.5},
        {},
        "`branch_scale` must be 0.5, as when this state dict was saved, got 1.0",
    ),
    (
        {"eps_k": 0.25},
        {"eps_k": 1e-5},
        "`eps_k` must be 0.25, as when this state dict was saved, got 1e-05",
    ),
    (
        {"gate_from": "pooled"},
        {},
        "`gate_from` must be 'pooled', as when this state dict was saved, got 'context'",
    ),
]


def make_stream(**options: Any) -> DeltaStream:
    return DeltaStream(D, [nn.Linear(D, D) for _ in range(3)], value_channels=M, **options)


@pytest.mark.parametrize(("saved", "ours", "sentence"), OTHERS, ids=[s for _, _, s in OTHERS])
@pytest.mark.parametrize("strict", [True, False])
def test_one_of_other_options_is_refused_in_one_sentence(
    saved: dict[str, Any], ours: dict[str, Any], sentence: str, strict: bool
) -> None:
    """Also if it was written to a file, and once for all residuals of a stream."""
    file = io.BytesIO()
    torch.save(make_stream(**saved).state_dict(), file)
    file.seek(0)
    state = torch.load(file, weights_only=True)
    with pytest.raises(RuntimeError) as raised:
        make_stream(**ours).load_state_dict(state, strict=strict)
    assert str(raised.value).splitlines()[1:] == [f"\t{sentence}"]
    make_stream(**saved).load_state_dict(state, strict=strict)


@pytest.mark.parametrize("noted", [None, {}, {"version": 1, "options": {"erase": "none"}}])
def test_one_without_the_options_loads(noted: dict[str, Any] | None) -> None:
    """Those of earlier versions, and of safetensors, say nothing of some options or of all."""
    theirs, ours = DeltaResidual(D, M), DeltaResidual(D, M, erase="none", branch_scale=0.5)
    state = theirs.state_dict()
    if noted is None:
        del state._metadata
    else:
        state._metadata[""] = noted
    ours.load_state_dict(state)
    assert all(map(torch.equal, ours.parameters(), theirs.parameters()))


def test_one_of_options_that_are_gone_is_refused() -> None:
    """It has the names and shapes of a residual of today."""
    residual = DeltaResidual(D, M, erase="none")
    state = residual.state_dict()
    state._metadata[""]["options"] |= {"heads": 1, "normalize": False}
    with pytest.raises(ValueError, match=r"^`normalize` must be True, got False, which"):
        residual.load_state_dict(state)
    state._metadata[""]["options"] |= {"normalize": True}
    residual.load_state_dict(state)


def test_what_starts_otherwise_loads() -> None:
    theirs, ours = DeltaResidual(D, M), DeltaResidual(D, M, beta_init=0.5, value_init=0.0)
    ours.load_state_dict(theirs.state_dict())
    assert all(map(torch.equal, ours.parameters(), theirs.parameters()))
