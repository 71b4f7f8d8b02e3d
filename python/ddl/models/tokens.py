"""Tokens: where the tokens of one forward pass stand, which is all that attention needs of them."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ddl.models.cache import Cache


class Tokens(NamedTuple):
    """Where the tokens of one forward pass stand among all tokens of their sequences.

    start: how many tokens the cache has of every sequence; these come after them.
    positions: (B, T) int64 for the rotation; None for start, start + 1, …
    visible: bool, broadcast to (B, H, T, start + T), what each token attends to; None for itself
        and everything before it, where `start` is 0, or T is 1.
    cache: keys and values of the tokens before; None for none.
    """

    start: int = 0
    positions: Tensor | None = None
    visible: Tensor | None = None
    cache: Cache | None = None


ALONE = Tokens()  # whole sequences, without padding


def place(
    batch: int, new: int, attention_mask: Tensor | None, cache: Cache | None
) -> tuple[Tokens, Tensor | None]:
    """Where `new` more tokens of each sequence stand after those in the cache.

    attention_mask: (batch, start + new), zero for padding, which has no position of its own and is
        not attended to; None for no padding.

    Returns the tokens, and which of them are none of the padding, (batch, new) bool; None for all.
    Raises ValueError for a mask that does not fit.
    """
    start = 0 if cache is None else cache.length
    mask = None
    if attention_mask is not None:
        mask = _checked(attention_mask, (batch, start + new), start)
    if mask is not None:
        positions = (mask.cumsum(-1) - 1).clamp(min=0)[:, start:]
        return Tokens(start, positions, _attended(mask, start), cache), mask[:, start:]
    # Attention has a causal mask of its own, but only for queries that start with the keys.
    visible = None
    if cache is not None and start > 0 and new > 1:
        visible = _causal(start, new, cache.device)
    return Tokens(start, None, visible, cache), None


def on_host(x: Tensor) -> bool:
    """Whether a look at its numbers costs nothing and is possible."""
    return x.device.type == "cpu" and type(x) is Tensor and not torch.compiler.is_compiling()


def _checked(mask: Tensor, shape: tuple[int, int], start: int) -> Tensor | None:
    """The mask as bool, or None where it is known to hide nothing."""
    if not isinstance(mask, Tensor) or tuple(mask.shape) != shape:
        got = tuple(mask.shape) if isinstance(mask, Tensor) else type(mask).__name__
        raise ValueError(f"`attention_mask` must have shape {shape}, got {got}")
    mask = mask.bool()
    if not on_host(mask):
        return mask
    if mask.all():
        return None
    if start > 0 and (mask[:, 1:] < mask[:, :-1]).any():
        raise ValueError(
            "`attention_mask` must have its padding on the left to go on from a cache, got padding "
            "behind a token"
        )
    return mask


def _attended(mask: Tensor, start: int) -> Tensor:
    """(B, 1, T, start + T): everything before a token but padding, and the token itself, even if it
    is padding: attention to nothing at all would be 0/0."""
    causal = _causal(start, mask.shape[1] - start, mask.device)
    itself = causal & ~causal.tril(start - 1)
    return (causal & mask[:, None, None, :]) | itself


def _causal(start: int, tokens: int, device: torch.device | None) -> Tensor:
    """(T, start + T): the first token sees start + 1, the next one more, …"""
    return torch.ones(tokens, start + tokens, dtype=torch.bool, device=device).tril(start)
