"""The past of a stream as a layer of transformers' cache."""

from __future__ import annotations

from typing import Any

from ddl.hf.cache import CACHE, RowsLayer
from ddl.nn.history import History

__all__ = ["HistoryLayer", "history_in"]

RECORDED = 2**31  # tokens that can be cropped while the past is recorded: all


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
