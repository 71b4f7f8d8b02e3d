"""Tokens: positions, attention mask and cache of the tokens of one forward pass."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ddl.ops.checks import check_is_tensor, check_mask, check_shape

from .cache import Cache, StaticPlace, begins_of, visible_keys


class Tokens(NamedTuple):
    """Positions, attention mask and cache of the tokens of one forward pass.

    start: number of cached tokens per sequence, which come before these.
    positions: (B, T) int64 for the rotation; None for start, start + 1, …
    causal: each token attends to itself and those before it, with no cached tokens and no padding.
    visible: bool, broadcast to (B, H, T, start + T), True for keys to attend to; None for all. Or
        the mask of another attention function, in its own form.
    cache: keys and values of the cached tokens; None for no cache.
    begins: (B, T) int64, the number of the first token of each one's document, counted from the
        first cached token; None if that is 0 for all.
    keep: (B, T) bool, False for padding; None if there is none.
    document_starts: (B, T) bool, the first token of each document; None if none begins here.
    attention: further arguments of the attention function, if a model brings one of its own; None
        if it does not.
    """

    start: int = 0
    positions: Tensor | None = None
    causal: bool = True
    visible: Any = None
    cache: Cache | None = None
    begins: Tensor | None = None
    keep: Tensor | None = None
    document_starts: Tensor | None = None
    attention: Mapping[str, Any] | None = None


ALONE = Tokens()  # whole sequences, without padding


def place(
    x: Tensor,
    attention_mask: Tensor | None,
    cache: Cache | None,
    document_starts: Tensor | None = None,
) -> Tokens:
    """Compute positions and attention mask of x (B, T, d), which follows the cached tokens.

    attention_mask: (B, start + T), 0 for padding, which takes no position and is not attended to;
        None for no padding. With a static cache only for the first tokens.
    document_starts: (B, T) bool, True for the first token of each document. Positions start again
        there, and no token attends to another document. None if the last one goes on.

    Raises ValueError or TypeError if a mask does not fit.
    """
    batch, new = x.shape[:2]
    if document_starts is not None:
        check_mask("document_starts", document_starts, (batch, new), x)
    if cache is not None and cache.is_static:
        return _place_static(x, attention_mask, cache, document_starts)
    start = 0 if cache is None else cache.length
    mask = None
    if attention_mask is not None:
        mask = _checked(attention_mask, (batch, start + new), left=start > 0)
    before = None if cache is None else cache.begins
    several = document_starts is not None or before is not None
    if mask is None and not several:
        if start == 0:
            return Tokens(cache=cache)
        visible = None
        if new > 1:  # is_causal of torch's attention fits only if queries and keys start together
            visible = torch.ones(new, start + new, dtype=torch.bool, device=x.device).tril(start)
        return Tokens(start, None, False, visible, cache)
    numbers = torch.arange(start, start + new, device=x.device)
    begins = begins_of(numbers.expand(batch, new), document_starts, before)
    positions, keep = numbers - begins, None
    if mask is not None:
        count = (mask.cumsum(-1) - 1).clamp(min=0)
        positions, keep = count[:, start:] - count.gather(1, begins), mask[:, start:]
    visible = visible_keys(numbers, begins, mask, start + new)
    begun = begins if several else None
    return Tokens(start, positions, False, visible, cache, begun, keep, document_starts)


def _place_static(
    x: Tensor, attention_mask: Tensor | None, cache: Cache, document_starts: Tensor | None
) -> Tokens:
    """Do as `place` without reading anything from the device."""
    mask = None
    if cache.batch_size is None:
        if attention_mask is not None:
            mask = _checked(attention_mask, (x.shape[0], x.shape[1]), left=True)
        cache.static = StaticPlace(cache.config.block_size, x, mask)
    elif attention_mask is not None:
        got = tuple(getattr(attention_mask, "shape", ()))
        raise ValueError(
            "`attention_mask` must be left out after the first pass of a static cache, which "
            f"remembers the padding, got one of shape {got}"
        )
    assert cache.static is not None
    positions, visible, begins = cache.static.place(x, document_starts)
    begun = None if document_starts is None else begins  # else the cache knows
    return Tokens(0, positions, False, visible, cache, begun, mask, document_starts)


def on_host(x: Tensor) -> bool:
    """Return whether the host can read x without waiting: a plain CPU tensor outside compile."""
    return x.device.type == "cpu" and type(x) is Tensor and not torch.compiler.is_compiling()


def check_length(idx: Tensor, longest: int | None) -> None:
    """Raise ValueError unless idx has shape (batch, 1 to longest); None for any length."""
    if idx.ndim != 2 or idx.shape[1] < 1 or (longest is not None and idx.shape[1] > longest):
        most = "tokens" if longest is None else f"1 to block_size = {longest}"
        raise ValueError(f"`idx` must have shape (batch, {most}), got {tuple(idx.shape)}")


def check_vocabulary(
    name: str, tokens: Tensor, vocab_size: int, besides: int | None = None
) -> None:
    """Raise ValueError for a number that is neither a token nor `besides`."""
    # On a GPU the check would wait for the device; there torch's own assertions catch the error.
    if not on_host(tokens) or tokens.numel() == 0:
        return
    known = tokens if besides is None else tokens.where(tokens != besides, 0)
    low, high = (int(x) for x in known.aminmax())
    if low < 0 or high >= vocab_size:
        expected = f"tokens from 0 to vocab_size - 1 = {vocab_size - 1}"
        expected += "" if besides is None else f", or {besides}"
        raise ValueError(f"`{name}` must hold {expected}, got {low if low < 0 else high}")


def _checked(mask: Any, shape: tuple[int, int], *, left: bool) -> Tensor | None:
    """Check the mask and return it as bool; None if it is known to hide nothing.

    left: raise ValueError, too, for padding after a token, if the host can see it.
    """
    check_is_tensor("attention_mask", mask)
    check_shape("attention_mask", mask, shape)
    if mask.is_floating_point():  # an additive mask of 0 and −∞ would pass
        expected = "dtype bool or int64, with zeros for padding"
        raise TypeError(f"`attention_mask` must have {expected}, got {mask.dtype}")
    numbers, mask = mask, mask.bool()
    if not on_host(mask):
        return mask
    if (numbers != mask).any():
        strange = int(numbers[numbers != mask][0])
        raise ValueError(f"`attention_mask` must consist of zeros and ones, got {strange}")
    if left and (mask[:, 1:] < mask[:, :-1]).any():
        raise ValueError(
            "`attention_mask` must have its padding on the left to go on from a cache, got padding "
            "behind a token"
        )
    return None if mask.all() else mask
