"""The past of our models and of converted decoders, as caches of transformers.

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
from transformers.cache_utils import CacheLayerMixin
from transformers.modeling_outputs import CausalLMOutputWithPast

from ddl.models.cache import Cache
from ddl.models.config import GPTConfig
from ddl.nn.history import History

RECORDED = 2**31  # tokens that can be cropped while the past of a stream is recorded: all
OLD_NAME = "past_key_values"
RENAMED = "cache" in (field.name for field in fields(CausalLMOutputWithPast))
CACHE = "cache" if RENAMED else OLD_NAME
CACHE_NAMES = (CACHE, OLD_NAME)


def refuse_continuous_batching(needs: str) -> NoReturn:
    """Raise ValueError; transformers would log an error for each request, and return no tokens."""
    pages = "`generate_batch` (continuous batching) has pages for keys and values alone"
    raise ValueError(f"{pages}, and {needs}: call `generate`")


class RowsLayer(CacheLayerMixin):
    """A layer of transformers' cache that holds something else than keys and values.

    held: it, with the `batch_size` (None while it is empty) and the `select` of a `Cache`.
    """

    is_sliding = False
    supports_early_init = False

    def __init__(self, held: Any) -> None:
        super().__init__()
        self.held = held

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Replace the batch by the sequences `beam_idx`, (B',) int64."""
        self.held.select(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Do as `reorder_cache`."""
        self.reorder_cache(indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each sequence `repeats` times, copies next to each other."""
        if self.held.batch_size is not None:
            self.reorder_cache(torch.arange(self.held.batch_size).repeat_interleave(repeats))

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.get_seq_length() + query_length, 0

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Do nothing: the first pass begins."""

    def update(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise TypeError(f"a {type(self).__name__} has no keys and values, got some")


class DDLLayer(RowsLayer):
    """The layer of a `DDLCache`."""

    @property
    def batch_size(self) -> int:
        """Number of sequences; −1 while the cache is empty."""
        return -1 if self.held.batch_size is None else self.held.batch_size

    def reorder_cache(self, beam_idx: Tensor) -> None:
        if self.held.device is not None:
            self.held.select(beam_idx.to(self.held.device))

    def get_seq_length(self) -> int:
        return self.held.length

    def get_max_length(self) -> int:
        return self.held.config.block_size

    def reset(self) -> None:
        self.held = Cache(self.held.config)

    def crop(self, tokens_to_remove: int) -> None:
        """Do nothing for 0; raise ValueError for every other number."""
        if tokens_to_remove != 0:
            raise ValueError(
                f"`tokens_to_remove` must be 0, got {tokens_to_remove}: a token that a compression "
                "over time has seen cannot be taken back"
            )


class HistoryLayer(RowsLayer):
    """A layer of a cache, after those of the keys and values, with the History of a stream.

    It is reordered, repeated and selected with the cache. It can be cropped while the cache records
    its past, as in assisted decoding: between two crops the inputs of all convolutions over time
    are kept.
    """

    is_compileable = True  # as far as the other layers are: masks depend on it
    is_croppable = True

    def __init__(self, *, is_sliding: bool = False) -> None:
        """is_sliding: whether all layers before it are: masks are made for the first other one."""
        super().__init__(History())
        self.is_sliding = is_sliding

    @property
    def record_past(self) -> bool:
        """Whether tokens can be taken back."""
        return self.held.crops > 0

    @record_past.setter
    def record_past(self, recorded: bool) -> None:
        self.held.record(RECORDED if recorded else 0)

    def activate_past_recording(self) -> None:
        """Keep what a crop needs, from now on."""
        self.record_past = True

    def crop(self, tokens_to_remove: int) -> None:
        """Take back −tokens_to_remove tokens, and forget what only they could need.

        Raises ValueError for more tokens than were recorded.
        """
        if tokens_to_remove or self.record_past:
            self.held.crop(-tokens_to_remove)
            self.held.record(self.held.crops)  # what is left stays

    def reset(self) -> None:
        """Forget all tokens."""
        self.held = History(crops=self.held.crops)

    def get_seq_length(self) -> int:
        """0: the layers before this one count tokens."""
        return 0

    def get_max_length(self) -> int:
        return -1


class DDLCache(transformers.Cache):
    """Keys, values and the residual stream's history of one batch of sequences.

    `generate` makes one, returns it and can continue from it. `.cache` is a
    `ddl.models.cache.Cache`, which grows up to block_size. Beam search reorders it. Convolutions
    over time cannot forget a token, so `crop`, and with it assisted decoding, raises ValueError.
    """

    def __init__(self, config: GPTConfig) -> None:
        super().__init__(layers=[DDLLayer(Cache(config))])

    def __repr__(self) -> str:
        return f"DDLCache({self.cache.length} of {self.cache.config.block_size} tokens)"

    @property
    def cache(self) -> Cache:
        layer: Any = self.layers[0]
        held: Cache = layer.held
        return held


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


def history_in(cache: Any, layers: int) -> History:
    """The history in a decoder's cache, behind its `layers`; a new one in an empty cache.

    Raises ValueError if the cache holds tokens, and no history of them, or if it is offloaded.
    """
    for layer in cache.layers[layers:]:
        if isinstance(layer, HistoryLayer):
            return layer.held
    if cache.get_seq_length() > 0:
        raise ValueError(
            f"`{CACHE}` must have been filled by a converted model without gradients, "
            "because reads of several tokens go on from it, got keys and values alone"
        )
    if cache.offloading:
        raise ValueError(
            f"`{CACHE}` must not be offloaded if reads take several tokens, got a cache "
            "that brings its layers back one by one"
        )
    while len(cache.layers) < layers:  # as the cache itself does when a layer is first used
        cache.layers.append(cache.layer_class_to_replicate())
    made = HistoryLayer(is_sliding=all(cache.is_sliding))
    cache.layers.append(made)
    return made.held
