"""History: what past tokens leave for the next, so that a stream can run token by token."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor

from ddl.options import check_count, refuse

__all__ = ["History"]

# Of inputs (B, T, …), None and None: a tuple, whose last is what they leave to the next tokens.
Again = Callable[[Tensor, None, None], tuple[Tensor, ...]]


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
    crops: how many of the last tokens `crop` can take back. Their inputs are kept, too: of a token
        read (crops + K − 1)·d·m numbers for each sequence. Not with `static`, and without
        documents that start within the sequence.

    Raises ValueError for `crops` below 0, or beside `static`.
    """

    def __init__(self, *, static: bool = False, crops: int = 0) -> None:
        check_count("crops", crops, least=0)
        if static and crops:
            refuse("crops", "0 with static=True", crops, ("static",))
        self.static, self.crops = static, crops
        self._kept: dict[str, Tensor] = {}
        self._new: dict[str, Tensor] = {}  # from the current forward pass
        self._inputs: dict[str, Tensor] = {}  # of the last tokens, if some of them can be cropped
        self._new_inputs: dict[str, Tensor] = {}
        self._dtype: torch.dtype | None = None
        self._resolved: tuple[Hashable, Any] = (None, None)  # a key, and what was resolved for it

    def begin(self, dtype: torch.dtype | None = None) -> None:
        """Start a forward pass: discard what was set and not committed.

        dtype: of the states. Raises ValueError if it was another before.
        """
        if self._kept and dtype not in (None, self._dtype):
            got = f"{dtype} after {self._dtype}"
            raise ValueError(f"`history` must be used in one dtype, got {got}")
        self._new, self._new_inputs, self._dtype = {}, {}, dtype or self._dtype

    def commit(self) -> None:
        """Keep what was set since `begin`."""
        if self.static:
            fresh = [name for name in self._new if name not in self._kept]
            self._kept |= {name: torch.empty_like(self._new[name]) for name in fresh}
            for name, new in self._new.items():
                self._kept[name].copy_(new)
        else:
            self._kept.update(self._new)
            self._inputs.update(self._new_inputs)
        self._new, self._new_inputs = {}, {}

    def get(self, name: str, again: Again | None = None) -> Tensor | None:
        """Return what past tokens left, (B, t, …); None before the first.

        again: computes it from their inputs, for tokens that were cropped; see `set`.
        """
        kept = self._kept.get(name)
        if kept is None and name in self._inputs:
            assert again is not None
            kept = self._kept[name] = again(self._inputs[name], None, None)[-1]
        return kept

    def set(self, name: str, kept: Tensor, inputs: Tensor | None = None) -> None:
        """Leave `kept` (B, t, …) to the next pass.

        inputs: (B, T, …), of which `kept` is what the last t tokens amount to; None if nothing that
        is kept here can be cropped.
        """
        self._new[name] = kept
        if self.crops:
            if inputs is None:
                raise ValueError(
                    f"`history` must be one with crops=0, got crops={self.crops}: what `{name}` "
                    "keeps is of all tokens"
                )
            before = self._inputs.get(name)
            inputs = inputs if before is None else torch.cat((before, inputs), 1)
            self._new_inputs[name] = inputs[:, -(self.crops + kept.shape[1]) :].clone()

    def crop(self, tokens: int) -> None:
        """Take back the last `tokens` tokens, as if they had never been seen.

        Raises ValueError if they are more than `crops`.
        """
        check_count("tokens", tokens, least=0, most=self.crops)
        self.begin()
        if tokens:
            self._kept = {}
            self._inputs = {name: inputs[:, :-tokens] for name, inputs in self._inputs.items()}
            self._inputs = {name: kept for name, kept in self._inputs.items() if kept.shape[1]}

    def clone(self) -> History:
        """A copy, whose tensors are copies."""
        other = History(static=self.static, crops=self.crops)
        other._kept = {name: kept.clone() for name, kept in self._kept.items()}
        other._inputs = {name: inputs.clone() for name, inputs in self._inputs.items()}
        other._dtype = self._dtype
        return other

    def resolved(self, key: Hashable, resolve: Callable[[], Any]) -> Any:
        """Return what `resolve` computes, computed by the first pass with this key."""
        if self._resolved[0] != key:
            self._resolved = (key, resolve())
        return self._resolved[1]

    def select(self, rows: Tensor) -> None:
        """Replace the batch by the sequences `rows`, (B',) int64, to reorder or repeat them."""
        self.begin()
        self._new = {name: kept.index_select(0, rows) for name, kept in self._kept.items()}
        self._new_inputs = {name: x.index_select(0, rows) for name, x in self._inputs.items()}
        self.commit()
