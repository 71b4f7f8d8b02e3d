"""The past of a stream as a layer of transformers' cache."""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin

from ddl.hf.cache import CACHE
from ddl.nn.history import History

__all__ = ["HistoryLayer", "history_in"]

RECORDED = 2**31  # tokens that can be cropped while the past is recorded: all


class HistoryLayer(CacheLayerMixin):
    """A layer of a cache, after those of the keys and values, with the History of a stream.

    It is reordered, repeated and selected with the cache. It can be cropped while the cache records
    its past, as in assisted decoding: between two crops the inputs of all convolutions over time
    are kept.
    """

    is_compileable = True  # as far as the other layers are: masks depend on it
    is_croppable = True
    supports_early_init = False

    def __init__(self, *, is_sliding: bool = False) -> None:
        """is_sliding: whether all layers before it are: masks are made for the first other one."""
        super().__init__()
        self.history, self.is_sliding = History(), is_sliding

    @property
    def record_past(self) -> bool:
        """Whether tokens can be taken back."""
        return self.history.crops > 0

    @record_past.setter
    def record_past(self, recorded: bool) -> None:
        self.history.record(RECORDED if recorded else 0)

    def activate_past_recording(self) -> None:
        """Keep what a crop needs, from now on."""
        self.record_past = True

    def crop(self, tokens_to_remove: int) -> None:
        """Take back −tokens_to_remove tokens, and forget what only they could need.

        Raises ValueError for more tokens than were recorded.
        """
        if tokens_to_remove > 0:
            raise ValueError(
                "`tokens_to_remove` must be at most 0, minus the tokens to take back, got "
                f"{tokens_to_remove}"
            )
        if tokens_to_remove or self.record_past:
            self.history.crop(-tokens_to_remove)
            self.history.record(self.history.crops)  # what is left stays

    def reset(self) -> None:
        """Forget all tokens."""
        self.history = History(crops=self.history.crops)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Replace the batch by the sequences `beam_idx`, (B',) int64."""
        self.history.select(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Do as `reorder_cache`."""
        self.history.select(indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each sequence `repeats` times, copies next to each other."""
        if self.history.batch_size is not None:
            self.history.select(torch.arange(self.history.batch_size).repeat_interleave(repeats))

    def get_seq_length(self) -> int:
        """0: the layers before this one count tokens."""
        return 0

    def get_max_length(self) -> int:
        return -1

    def offload(self) -> None:
        """Do nothing: a history is small."""

    def prefetch(self) -> None:
        """Do nothing: a history stays on its device."""

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Do nothing: a history begins with the first tokens."""

    def get_mask_sizes(self, query_length: int) -> NoReturn:
        raise TypeError("a HistoryLayer has no keys, got a request for the size of their mask")

    def update(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise TypeError("a HistoryLayer has no keys and values, got some")


def history_in(cache: Any, layers: int) -> History:
    """The history in a decoder's cache, behind its `layers`; a new one in an empty cache.

    Raises ValueError if the cache holds tokens, and no history of them, or if it is offloaded.
    """
    for layer in cache.layers[layers:]:
        if isinstance(layer, HistoryLayer):
            return layer.history
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
    return made.history
