"""DDLCache: the model's cache with the interface that Hugging Face's `generate` expects.

CACHE: the name of a cache among the arguments and outputs of transformers' models, `cache` from
version 5.24 on. Both names are read, because the older one is still given.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any, NoReturn

import torch
import transformers
from torch import Tensor
from transformers.modeling_outputs import CausalLMOutputWithPast

from ddl.models.cache import Cache
from ddl.models.config import GPTConfig

__all__ = [
    "CACHE",
    "CACHE_NAMES",
    "DDLCache",
    "cache_in",
    "our_cache",
    "refuse_continuous_batching",
]

OLD_NAME = "past_key_values"
RENAMED = "cache" in (field.name for field in fields(CausalLMOutputWithPast))
CACHE = "cache" if RENAMED else OLD_NAME
CACHE_NAMES = (CACHE, OLD_NAME)


def refuse_continuous_batching(needs: str) -> NoReturn:
    """Raise ValueError; transformers would log an error for each request, and return no tokens."""
    pages = "`generate_batch` (continuous batching) has pages for keys and values alone"
    raise ValueError(f"{pages}, and {needs}: call `generate`")


class DDLCache(transformers.Cache):
    """Keys, values and the residual stream's history of one batch of sequences.

    `generate` makes one, returns it and can continue from it. `.cache` is a
    `ddl.models.cache.Cache`, which grows up to block_size. Beam search reorders it. Convolutions
    over time cannot forget a token, so `crop`, and with it assisted decoding, raises ValueError.
    """

    def __init__(self, config: GPTConfig) -> None:
        super().__init__(layers=[])
        self.cache = Cache(config)

    def __len__(self) -> int:
        return self.cache.config.num_layers

    def __repr__(self) -> str:
        return f"DDLCache({self.cache.length} of {self.cache.config.block_size} tokens)"

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Number of tokens so far, padding included."""
        return self.cache.length

    def get_max_length(self, layer_idx: int | None = None) -> int:
        """Largest number of tokens: block_size."""
        return self.cache.config.block_size

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        return self.cache.length + query_length, 0

    @property
    def is_linear(self) -> list[bool]:
        """Of no layer; `generate` gives a linear one tokens again that the cache holds."""
        return [False] * len(self)

    @property
    def is_croppable(self) -> bool:
        return False

    def crop(self, tokens_to_remove: int) -> None:
        """Do nothing for 0; raise ValueError for every other number."""
        if tokens_to_remove != 0:
            raise ValueError(
                f"`tokens_to_remove` must be 0, got {tokens_to_remove}: a token that a compression "
                "over time has seen cannot be taken back"
            )

    def reset(self) -> None:
        """Forget all tokens."""
        self.cache = Cache(self.cache.config)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Replace the batch by the sequences `beam_idx`, (B',) int64."""
        device = self.cache.device
        if device is not None:
            self.cache.select(beam_idx.to(device))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Do as `reorder_cache`."""
        self.reorder_cache(indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each sequence `repeats` times, copies next to each other."""
        if self.cache.batch_size is not None:
            rows = torch.arange(self.cache.batch_size, device=self.cache.device)
            self.cache.select(rows.repeat_interleave(repeats))

    @property
    def batch_size(self) -> int:
        """Number of sequences; −1 while the cache is empty."""
        return -1 if self.cache.batch_size is None else self.cache.batch_size

    def update(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Raise TypeError: only a DDL model can fill this cache."""
        raise TypeError(f"`{CACHE}` must be given to a DDL model, got another's")


def cache_in(given: Mapping[str, Any]) -> Any:
    """The cache among the arguments of a model; None if there is none."""
    return next((given[name] for name in CACHE_NAMES if given.get(name) is not None), None)


def our_cache(cache: Any) -> DDLCache | None:
    """The cache that a model is given, if any; raise ValueError for another kind."""
    if cache is not None and not isinstance(cache, DDLCache):
        raise ValueError(
            f"`{CACHE}` must be a ddl.hf.DDLCache, got {type(cache).__name__}: keys and values "
            "alone, as of prefix tuning, lack what the stream keeps of past tokens"
        )
    return cache
