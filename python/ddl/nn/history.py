"""History: what past tokens leave for the next, so that a stream can run token by token."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor

__all__ = ["History"]


class History:
    """The past tokens that the convolutions over time of a stream need, by name.

    A token read and a convolved gate keep what past tokens add to their next K − 1 outputs, an
    expansion with expand="conv" its last K − 1 inputs. Nothing is kept before the first token, and
    a stream without such convolutions leaves the History empty.

    A History belongs to one stream and one batch of sequences; `stream(x, history=history)` reads
    and extends it, without gradients. What the stream's parameters amount to is computed once per
    History, so make a new one after changing them.

    Values count only after `commit`, so a forward pass that an error or Ctrl-C interrupts can be
    repeated.

    static: keep everything at the same addresses from the first pass on, as a CUDA graph needs.
    """

    def __init__(self, *, static: bool = False) -> None:
        self.static = static
        self._kept: dict[str, Tensor] = {}
        self._new: dict[str, Tensor] = {}  # from the current forward pass
        self._dtype: torch.dtype | None = None
        self._resolved: tuple[Hashable, Any] = (None, None)  # a key, and what was resolved for it

    def begin(self, dtype: torch.dtype | None = None) -> None:
        """Start a forward pass: discard what was set and not committed.

        dtype: of the states. Raises ValueError if it was another before.
        """
        if self._kept and dtype not in (None, self._dtype):
            got = f"{dtype} after {self._dtype}"
            raise ValueError(f"`history` must be used in one dtype, got {got}")
        self._new, self._dtype = {}, dtype or self._dtype

    def commit(self) -> None:
        """Keep what was set since `begin`."""
        if self.static:
            fresh = [name for name in self._new if name not in self._kept]
            self._kept |= {name: torch.empty_like(self._new[name]) for name in fresh}
            for name, new in self._new.items():
                self._kept[name].copy_(new)
        else:
            self._kept.update(self._new)
        self._new = {}

    def get(self, name: str) -> Tensor | None:
        """Return what past tokens left, (B, t, …); None before the first."""
        return self._kept.get(name)

    def set(self, name: str, kept: Tensor) -> None:
        """Leave `kept` (B, t, …) to the next pass."""
        self._new[name] = kept

    def resolved(self, key: Hashable, resolve: Callable[[], Any]) -> Any:
        """Return what `resolve` computes, computed by the first pass with this key."""
        if self._resolved[0] != key:
            self._resolved = (key, resolve())
        return self._resolved[1]

    def select(self, rows: Tensor) -> None:
        """Replace the batch by the sequences `rows`, (B',) int64, to reorder or repeat them."""
        self.begin()
        self._new = {name: kept.index_select(0, rows) for name, kept in self._kept.items()}
        self.commit()
