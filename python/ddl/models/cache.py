"""Cache: keys, values, states and convolution inputs of past tokens, to go on token by token."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ddl.nn.history import History

from .config import GPTConfig

LEAST_GROWTH = 64  # tokens


class Cache:
    """Keys and values of every attention, states of every mixer, and the stream's history.

    `model(idx, cache=cache)` continues the cached sequences by idx and appends idx. A cache belongs
    to one batch, one model and one dtype. Use it for inference, under torch.no_grad() or throughout
    under torch.inference_mode(). An interrupted forward pass leaves it unchanged.

    Full buffers double, up to block_size, so n tokens cost O(n) copies in all. The host never reads
    the buffers, so a GPU is not synchronised.

    static: keep everything on the device and at the same addresses after the first pass, the number
        of tokens included, so that a step can be captured in a CUDA graph and replayed. Buffers
        have room for block_size tokens, and every step attends to all of it, masked. An
        `attention_mask` (B, T) may come with the first pass alone. On a GPU nobody counts: the
        caller must not exceed block_size, and reading `length` waits for the device.
    """

    def __init__(self, config: GPTConfig, *, static: bool = False) -> None:
        self.config = config
        self.history = History(static=static)  # of the stream and of the mixers
        self.is_static = static
        self.static: StaticPlace | None = None  # from the first pass on
        self._length = 0
        self.batch_size: int | None = None
        """Number of sequences; None while the cache is empty."""
        self.device: torch.device | None = None
        """Device of the past; None while the cache is empty."""
        self._dtype: torch.dtype | None = None  # of the embeddings
        # (B, 1) int64: the number of the last document's first token; None for 0.
        self.begins: Tensor | None = None
        # One tensor (2, B, H, capacity, head_dim) per attention: keys, then values.
        self._buffers: list[Tensor | None] = [None] * config.num_layers

    @property
    def length(self) -> int:
        """Number of tokens per sequence, padding included."""
        return self._length if self.static is None else int(self.static.position)

    def check(self, config: GPTConfig, x: Tensor) -> None:
        """Raise ValueError unless a model of this config can append x (B, T, d)."""
        batch, tokens = x.shape[:2]
        if config != self.config:
            raise ValueError("`cache` must be made of this model's config, got one of another's")
        if self.batch_size not in (None, batch):
            raise ValueError(
                f"`cache` must have {batch} sequences, as the input, got {self.batch_size}"
            )
        self._check_dtype(x.dtype, self._dtype)
        if self.is_static and x.device.type != "cpu":
            return  # to look at the position would wait for the device
        if not config.attends and not self.is_static:
            return  # states take no room for further tokens
        room = config.block_size - self.length
        if tokens > room:
            raise ValueError(
                f"`cache` must have room for {tokens} more tokens, got one with {self.length} of "
                f"block_size = {config.block_size}"
            )

    def extend(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Append the current tokens' keys and values (B, H, T, head_dim) for one attention.

        Returns all so far, (B, H, length + T, head_dim), or all there is room for if static.
        `advance` counts them, after all layers have appended theirs.
        """
        if self.static is not None:
            buffer = self._room(layer, keys, self.config.block_size)
            buffer[0].index_copy_(2, self.static.numbers, keys)
            buffer[1].index_copy_(2, self.static.numbers, values)
            return buffer[0], buffer[1]
        end = self._length + keys.shape[2]
        buffer = self._room(layer, keys, end)
        buffer[0, :, :, self._length : end] = keys
        buffer[1, :, :, self._length : end] = values
        return buffer[0, :, :, :end], buffer[1, :, :, :end]

    def advance(self, x: Tensor, begins: Tensor | None = None) -> None:
        """Count the current tokens x (B, T, d) as past, after every layer has appended theirs.

        begins: (B, T) as in `Tokens`.
        """
        last = None if begins is None else begins[:, -1:]
        if self.static is None:
            self._length += x.shape[1]
            self.begins = last
        else:
            if last is not None:
                self.static.begins.copy_(last)
            self.static.position += x.shape[1]
        self.history.commit()
        self.batch_size, self.device = x.shape[0], x.device
        self._dtype = x.dtype

    def select(self, rows: Tensor) -> None:
        """Replace the batch by the sequences `rows`, (B',) int64, to reorder or repeat them.

        An empty cache stays empty. Raises ValueError if a static cache would change its size.
        """
        if self.batch_size is None:
            return
        rows = rows.to(self.device)
        if self.static is not None and self.batch_size != len(rows):
            expected = f"{self.batch_size} rows, as many as the static cache has"
            raise ValueError(f"`rows` must be {expected}, got {len(rows)}")
        for layer, buffer in enumerate(self._buffers):
            if buffer is not None:
                rewritten = buffer.index_select(1, rows)
                self._buffers[layer] = rewritten if self.static is None else buffer.copy_(rewritten)
        if self.static is not None:
            self.static.select(rows)
        self.begins = None if self.begins is None else self.begins.index_select(0, rows)
        self.batch_size = len(rows)
        self.history.select(rows)

    @staticmethod
    def _check_dtype(now: torch.dtype, before: torch.dtype | None) -> None:
        """Raise ValueError if the dtype has changed, as when autocast is switched on or off."""
        if before not in (None, now):
            raise ValueError(f"`cache` must be used in one dtype, got {now} after {before}")

    def _room(self, layer: int, keys: Tensor, end: int) -> Tensor:
        """Return the layer's buffer, grown if needed to hold `end` tokens."""
        buffer = self._buffers[layer]
        if buffer is None or self.batch_size is None:  # an interrupted pass may leave a buffer
            batch, heads, _, width = keys.shape
            buffer = keys.new_empty((2, batch, heads, 0, width))
        self._check_dtype(keys.dtype, buffer.dtype)
        held = buffer.shape[3]
        if end > held:
            capacity = min(max(2 * held, end + LEAST_GROWTH), self.config.block_size)
            # Zeros, because a masked number that is not finite would not be masked.
            buffer = self._buffers[layer] = F.pad(buffer, (0, 0, 0, capacity - held))
        return buffer


class StaticPlace:
    """Where the tokens of a static cache are: on the device, at the same addresses.

    position: () int64, the number of cached tokens. hidden: (B, block_size) bool, True for padding.
    padded: (B, 1) int64, the padding before each sequence. begins: (B, 1) int64, the number of the
    last document's first token. numbers: (T,) int64, those of the current tokens.
    """

    def __init__(self, block_size: int, x: Tensor, mask: Tensor | None) -> None:
        """Start with x (B, T, d), the first tokens. mask: (B, T) bool, False for padding."""
        self.block_size = block_size
        batch, new = x.shape[:2]
        integers: dict[str, Any] = {"dtype": torch.int64, "device": x.device}
        self.position = torch.zeros((), **integers)
        self.hidden = torch.zeros(batch, block_size, dtype=torch.bool, device=x.device)
        self.padded = torch.zeros(batch, 1, **integers)
        self.begins = torch.zeros(batch, 1, **integers)
        if mask is not None:
            self.hidden[:, :new] = ~mask
            self.padded += (~mask).sum(-1, keepdim=True)

    def place(self, x: Tensor, document_starts: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """Return positions (B, T), visible keys (B, 1, T, block_size) and `begins` (B, T) of x."""
        self.numbers = self.position + torch.arange(x.shape[1], device=x.device)
        begins = begins_of(self.numbers.expand(x.shape[:2]), document_starts, self.begins)
        visible = visible_keys(self.numbers, begins, ~self.hidden, self.block_size)
        return (self.numbers - begins.maximum(self.padded)).clamp(min=0), visible, begins

    def select(self, rows: Tensor) -> None:
        """Replace the batch by the sequences `rows`."""
        for tensor in (self.hidden, self.padded, self.begins):
            tensor.copy_(tensor.index_select(0, rows))


def begins_of(numbers: Tensor, document_starts: Tensor | None, before: Tensor | None) -> Tensor:
    """Return the number of the first token of each one's document, (B, T) int64.

    numbers: (B, T), those of these tokens. document_starts: (B, T) bool. before: (B, 1), the
    number for the document before them; None for 0.
    """
    first = torch.zeros_like(numbers[:, :1]) if before is None else before
    if document_starts is None:
        return first.expand_as(numbers)
    return torch.where(document_starts, numbers, first).cummax(-1).values


def visible_keys(numbers: Tensor, begins: Tensor, shown: Tensor | None, keys: int) -> Tensor:
    """Return which of so many keys each token attends to, (B, 1, T, keys) bool.

    numbers: (T,), those of the tokens. begins: (B, T), as `begins_of`. shown: (B, keys) bool, False
    for padding; None for none. Padding attends to itself: attention to nothing would be 0/0.
    """
    each = torch.arange(keys, device=numbers.device)
    visible = (each <= numbers[:, None]) & (each >= begins[:, :, None])
    if shown is not None:
        visible = (visible & shown[:, None, :]) | (each == numbers[:, None])
    return visible.unsqueeze(1)
