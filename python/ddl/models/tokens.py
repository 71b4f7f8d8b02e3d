"""Tokens: where the tokens of one forward pass stand, which is all that attention needs of them."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ddl.ops.checks import check_is_tensor, check_shape

from .cache import Cache


class Tokens(NamedTuple):
    """Where the tokens of one forward pass stand among all tokens of their sequences.

    start: how many tokens the cache has of every sequence; these come after them.
    positions: (B, T) int64 for the rotation; None for start, start + 1, …
    causal: whether each token attends to itself and those before it, and these are all there is.
    visible: bool, broadcast to (B, H, T, start + T), what each token attends to; None for all.
    cache: keys and values of the tokens before; None for none.
    """

    start: int = 0
    positions: Tensor | None = None
    causal: bool = True
    visible: Tensor | None = None
    cache: Cache | None = None


ALONE = Tokens()  # whole sequences, without padding


def place(
    x: Tensor, attention_mask: Tensor | None, cache: Cache | None
) -> tuple[Tokens, Tensor | None]:
    """Where the tokens of x (B, T, d) stand after those in the cache.

    attention_mask: (B, start + T), zero for padding, which has no position of its own and is not
        attended to; None for no padding.

    Returns the tokens, and which of them are none of the padding, (B, T) bool; None for all. Raises
    ValueError or TypeError for a mask that does not fit.
    """
    batch, new = x.shape[:2]
    start = 0 if cache is None else cache.length
    mask = None
    if attention_mask is not None:
        mask = _checked(attention_mask, (batch, start + new), start, x.device)
    if mask is not None:
        positions = (mask.cumsum(-1) - 1).clamp(min=0)[:, start:]
        return Tokens(start, positions, False, _attended(mask, start), cache), mask[:, start:]
    if cache is None or start == 0:
        return Tokens(cache=cache), None
    # Attention has a causal mask of its own, but only for queries that start with the keys.
    visible = _causal(start, new, cache.device) if new > 1 else None
    return Tokens(start, None, False, visible, cache), None


def on_host(x: Tensor) -> bool:
    """Whether a look at its numbers costs nothing and is possible."""
    return x.device.type == "cpu" and type(x) is Tensor and not torch.compiler.is_compiling()


def check_vocabulary(
    name: str, tokens: Tensor, vocab_size: int, besides: int | None = None
) -> None:
    """Raises ValueError for a number that is no token, nor `besides`."""
    # On a GPU this would wait for the device; there torch's own assertions catch it.
    if not on_host(tokens) or tokens.numel() == 0:
        return
    known = tokens if besides is None else tokens.where(tokens != besides, 0)
    low, high = (int(x) for x in known.aminmax())
    if low < 0 or high >= vocab_size:
        expected = f"tokens from 0 to vocab_size - 1 = {vocab_size - 1}"
        expected += "" if besides is None else f", or {besides}"
        raise ValueError(f"`{name}` must hold {expected}, got {low if low < 0 else high}")


def _checked(mask: Any, shape: tuple[int, int], start: int, device: torch.device) -> Tensor | None:
    """The mask as bool, or None where it is known to hide nothing."""
    check_is_tensor("attention_mask", mask)
    check_shape("attention_mask", mask, shape)
    if mask.is_floating_point() or mask.is_complex():  # zeros and −∞, to be added, would pass
        expected = "dtype bool or int64, with zeros for padding"
        raise TypeError(f"`attention_mask` must have {expected}, got {mask.dtype}")
    if mask.device != device:
        raise ValueError(f"`attention_mask` must be on {device}, got a tensor on {mask.device}")
    numbers, mask = mask, mask.bool()
    if not on_host(mask):
        return mask
    if (numbers != mask).any():
        strange = int(numbers[numbers != mask][0])
        raise ValueError(f"`attention_mask` must consist of zeros and ones, got {strange}")
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
