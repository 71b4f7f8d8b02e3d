"""nanochat's KVCache with a history of the stream, for what reads more than one token."""

from __future__ import annotations

from typing import Any, TypeVar

import torch

from ddl.nanogpt.mixin import derived
from ddl.nn.history import History

Class = TypeVar("Class", bound=type)


def cached(kind: Class) -> Class:
    """Return a subclass of nanochat's KVCache that keeps the past of the stream, too.

        KVCache = ddl.nanochat.cached(KVCache)  # in nanochat/engine.py, after the class

    Token reads, an expansion by convolution and convolved gates need it. `prefill` copies it from a
    cache of one sequence to all, `reset` empties it.
    """
    made: Class = kind if issubclass(kind, _WithHistory) else derived(kind, _WithHistory)
    return made


class _WithHistory:
    """Mixin that keeps a history beside the keys and values."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.history = History()

    def reset(self) -> None:
        super().reset()  # type: ignore[misc]
        self.history = History()

    def prefill(self, other: Any) -> None:
        """Copy another cache, of as many sequences or of one."""
        super().prefill(other)  # type: ignore[misc]
        history = history_of(other, needed=True)
        assert history is not None
        self.history = history.clone()
        if other.batch_size != self.batch_size:  # type: ignore[attr-defined]
            rows = torch.zeros(self.batch_size, dtype=torch.int64)  # type: ignore[attr-defined]
            self.history.select(rows.to(self.cache_seqlens.device))  # type: ignore[attr-defined]


def history_of(kv_cache: Any, needed: bool) -> History | None:
    """The history in a cache; None without a cache, or where none is needed.

    Raises TypeError if the cache has none and one is needed.
    """
    if kv_cache is None or not needed:
        return None
    history = getattr(kv_cache, "history", None)
    if isinstance(history, History):
        return history
    raise TypeError(
        "`kv_cache` must be of the class that `ddl.nanochat.cached(KVCache)` returns, because what "
        f"reads several tokens needs their past, got {type(kv_cache).__name__}"
    )
