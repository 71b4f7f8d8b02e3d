"""Cache: keys, values and convolution inputs of past tokens, for token-by-token inference."""

from __future__ import annotations

from typing import NoReturn

import torch
from torch import Tensor

from ddl.config import GPTConfig
from ddl.nn.history import History
from ddl.ops.checks import check_is_tensor

LEAST_GROWTH = 64  # tokens


class Cache:
    """Keys and values of every attention, and the history of the residual stream.

    `model(idx, cache=cache)` continues the cached sequences by idx and appends idx. A cache belongs
    to one batch, one model and one dtype. Use it for inference, under torch.no_grad() or throughout
    under torch.inference_mode(). An interrupted forward pass leaves it unchanged.

    Full buffers double, up to block_size, so n tokens cost O(n) copies in all. The host never reads
    the buffers, so a GPU is not synchronised. Raises TypeError unless `config` is a GPTConfig.
    """

    def __init__(self, config: GPTConfig) -> None:
        if not isinstance(config, GPTConfig):
            raise TypeError(f"`config` must be a GPTConfig, got {type(config).__name__}")
        self.config = config
        self.length = 0  # tokens per sequence, padding included
        self.history = History()
        self._dtype: torch.dtype | None = None  # of the embeddings
        # One tensor (2, B, H, capacity, head_dim) per attention: keys, then values.
        self._buffers: list[Tensor | None] = [None] * config.num_layers

    @property
    def batch_size(self) -> int | None:
        """Number of sequences; None while the cache is empty."""
        first = self._buffers[0] if self.length > 0 else None
        return None if first is None else first.shape[1]

    @property
    def device(self) -> torch.device | None:
        """Device of the buffers; None while the cache is empty."""
        first = self._buffers[0]
        return None if first is None else first.device

    def check(self, config: GPTConfig, x: Tensor) -> None:
        """Raise ValueError unless a model of this config can append x (B, T, d)."""
        batch, tokens = x.shape[:2]
        if config != self.config:
            raise ValueError("`cache` must be made of this model's config, got one of another's")
        if self.batch_size not in (None, batch):
            raise ValueError(
                f"`cache` must have {batch} sequences, as the input, got {self.batch_size}"
            )
        if self._dtype not in (None, x.dtype):
            self._refuse_dtype(x.dtype, self._dtype)
        room = config.block_size - self.length
        if tokens > room:
            raise ValueError(
                f"`cache` must have room for {tokens} more tokens, got one with {self.length} of "
                f"block_size = {config.block_size}"
            )

    def extend(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Append the current tokens' keys and values (B, H, T, head_dim) for one attention.

        Returns all so far, (B, H, length + T, head_dim). `advance` updates `length`, after all
        layers have appended theirs.
        """
        if keys.requires_grad:
            self.refuse_gradients()
        end = self.length + keys.shape[2]
        buffer = self._room(layer, keys, end)
        buffer[0, :, :, self.length : end] = keys
        buffer[1, :, :, self.length : end] = values
        return buffer[0, :, :, :end], buffer[1, :, :, :end]

    def advance(self, x: Tensor) -> None:
        """Count the current tokens x (B, T, d) as past, after every layer has appended theirs."""
        self.length += x.shape[1]
        self._dtype = x.dtype

    def select(self, rows: Tensor) -> None:
        """Replace the batch by the sequences `rows`, (B',) int64, to reorder or repeat them."""
        check_is_tensor("rows", rows)
        if rows.dtype not in (torch.int64, torch.int32) or rows.ndim != 1:
            expected = "a vector of int64 row numbers"
            raise ValueError(f"`rows` must be {expected}, got {tuple(rows.shape)} of {rows.dtype}")
        self._buffers = [b if b is None else b.index_select(1, rows) for b in self._buffers]
        self.history.select(rows)

    @staticmethod
    def refuse_gradients() -> NoReturn:
        """Raise ValueError: a cache is for inference."""
        raise ValueError(
            "`cache` must be used under torch.no_grad() or torch.inference_mode(), got a forward "
            "pass with gradients"
        )

    @staticmethod
    def _refuse_dtype(now: torch.dtype, before: torch.dtype | None) -> NoReturn:
        raise ValueError(f"`cache` must be used in one dtype, got {now} after {before}")

    def _room(self, layer: int, keys: Tensor, end: int) -> Tensor:
        """Return the layer's buffer, grown if needed to hold `end` tokens."""
        old = self._buffers[layer] if self.length > 0 else None  # an interrupted pass may leave one
        if old is not None and old.dtype != keys.dtype:
            self._refuse_dtype(keys.dtype, old.dtype)  # autocast was switched on or off
        if old is not None and end <= old.shape[3]:
            return old
        held = 0 if old is None else old.shape[3]
        capacity = min(max(2 * held, end + LEAST_GROWTH), self.config.block_size)
        batch, heads, _, width = keys.shape
        new = keys.new_empty(2, batch, heads, capacity, width)
        if old is not None:
            new[:, :, :, : self.length] = old[:, :, :, : self.length]
        self._buffers[layer] = new
        return new
