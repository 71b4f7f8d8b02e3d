"""The stream lens: what the model would predict if the stream ended after each sublayer."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ddl.nn.additions import Addition
from ddl.nn.hooks import Rewrite, installed
from ddl.options import is_whole

from .sublayers import evaluating, hooks_of, unwrapped

__all__ = ["Lens", "lens"]


class Lens(NamedTuple):
    """The likeliest next tokens after every sublayer.

    sublayers: L + 1 names; the first is "embedding", the state before the first sublayer.
    tokens: (L + 1, B, T, top) int64, the likeliest first. probabilities: the same shape, float32.
    channel_tokens, channel_probabilities: (L + 1, m, B, T, top), from each value channel, or each
        stream of a baseline, alone; for m = 1 they equal `tokens` and `probabilities`.
    """

    sublayers: list[str]
    tokens: Tensor
    probabilities: Tensor
    channel_tokens: Tensor
    channel_probabilities: Tensor


@torch.no_grad()
def lens(model: nn.Module, idx: Tensor, *, top: int = 5) -> Lens:
    """Apply the model's own final read and head to the stream after every sublayer.

    The final read was trained on the last state only, so early rows show how far the stream is from
    what the head can read, not what the model "thinks" there (nostalgebraist's logit lens, 2020).
    A single value channel is read with the others at zero.

    Args:
        model: a model with a method `logits_of_state`, which maps a state X (B, T, d, m) to logits
            (B, T, V): ddl's GPT, Hugging Face's class, and a nanoGPT from `ddl.nanogpt.convert`
            have it.
        idx: (B, T) int64 tokens.
        top: number of likeliest tokens, at most V of which are returned.

    Raises:
        TypeError: `model` has no such method. ValueError: as `ddl.record`.
    """
    if not is_whole(top) or top < 1:
        raise ValueError(f"`top` must be an integer of at least 1, got {top!r}")
    inner: Any = unwrapped(model)
    if not callable(getattr(inner, "logits_of_state", None)):
        got = f"a {type(inner).__name__}"
        raise TypeError(f"`model` must have a method logits_of_state(state), got {got}")
    names: list[str] = []
    rows: list[tuple[Tensor, Tensor]] = []
    channels: list[tuple[Tensor, Tensor]] = []

    def read(name: str, state: Tensor) -> None:
        names.append(name)
        rows.append(_likeliest(inner.logits_of_state(state), top))
        alone = [_alone(state, j) for j in range(state.shape[-1])]
        each = [_likeliest(inner.logits_of_state(one), top) for one in alone]
        channels.append(tuple(torch.stack(part) for part in zip(*each, strict=True)))  # type: ignore[arg-type]

    def see(name: str, seen: Rewrite | Addition) -> None:
        if not names:
            read("embedding", seen.state)
        read(name, seen.after())

    hooks = hooks_of(inner, see)
    with evaluating(inner), installed(hooks):
        inner(idx)
    tokens, probabilities = (torch.stack(part) for part in zip(*rows, strict=True))
    of_channel, their = (torch.stack(part) for part in zip(*channels, strict=True))
    return Lens(names, tokens, probabilities, of_channel, their)


def _alone(state: Tensor, channel: int) -> Tensor:
    """The state with every value channel but one at zero."""
    only = torch.zeros(state.shape[-1], dtype=state.dtype, device=state.device)
    only[channel] = 1
    return state * only


def _likeliest(logits: Tensor, top: int) -> tuple[Tensor, Tensor]:
    found = logits.float().softmax(-1).topk(min(top, logits.shape[-1]), dim=-1)
    return found.indices.cpu(), found.values.cpu()
