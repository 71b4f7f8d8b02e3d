"""History: what past tokens leave for the next, so that a stream can run token by token."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ddl.options import check_count, refuse

__all__ = ["History"]

# (inputs (B, T, …), what was left before them, None) → (result, what they leave).
Recomputed = Callable[[Tensor, Tensor | None, None], tuple[Any, Tensor | None]]


class _Recorded(NamedTuple):
    """The last inputs (B, t, …) of a convolution, which can be computed again up to any of them.

    before: what was left to the first of them; None at the start of a sequence, or if there are
    more than can be taken back, by `span`, the number that what is left depends on.
    """

    before: Tensor | None
    inputs: Tensor
    span: int

    def joined(self, inputs: Tensor, crops: int) -> _Recorded:
        """With more inputs, and without those that are no longer needed."""
        return _Recorded(self.before, torch.cat((self.inputs, inputs), 1), self.span).last(crops)

    def last(self, crops: int) -> _Recorded:
        """Without those that are not needed to take back `crops` of them."""
        if self.inputs.shape[1] < crops + self.span:
            return self
        inputs = self.inputs[:, self.inputs.shape[1] - crops - self.span :]
        return _Recorded(None, inputs.clone(), self.span)

    def each(self, change: Callable[[Tensor], Tensor]) -> _Recorded:
        """With a change of both tensors."""
        before = None if self.before is None else change(self.before)
        return _Recorded(before, change(self.inputs), self.span)


class History:
    """The past of the convolutions over time of a stream, and of mixers, by name.

    A token read and a convolved gate keep what past tokens add to their next K − 1 outputs, an
    expansion with expand="conv" its last K − 1 inputs, a DeltaMixer its states, too. Nothing is
    kept before the first token, and a stream without any of these leaves the History empty.

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
        self._recorded: dict[str, _Recorded] = {}  # if some tokens can be taken back
        self._new_recorded: dict[str, _Recorded] = {}
        self._tokens, self._new_tokens = 0, 0  # that can be taken back
        self._dtype: torch.dtype | None = None
        self._resolved: tuple[Hashable, Any] = (None, None)  # a key, and what was resolved for it

    def begin(self, dtype: torch.dtype | None = None) -> None:
        """Start a forward pass: discard what was set and not committed.

        dtype: of the states. Raises ValueError if it was another before.
        """
        if self._kept and dtype not in (None, self._dtype):
            got = f"{dtype} after {self._dtype}"
            raise ValueError(f"`history` must be used in one dtype, got {got}")
        self._new, self._new_recorded, self._new_tokens = {}, {}, 0
        self._dtype = dtype or self._dtype

    def commit(self) -> None:
        """Keep what was set since `begin`."""
        if self.static:
            fresh = [name for name in self._new if name not in self._kept]
            self._kept |= {name: torch.empty_like(self._new[name]) for name in fresh}
            for name, new in self._new.items():
                self._kept[name].copy_(new)
        else:
            self._kept.update(self._new)
            recorded = self._recorded | self._new_recorded
            no_longer = () if self.crops else self._new
            self._recorded = {n: r for n, r in recorded.items() if n not in no_longer}
            self._tokens = min(self.crops, self._tokens + self._new_tokens)
        self._new, self._new_recorded, self._new_tokens = {}, {}, 0

    def get(self, name: str, call: Recomputed | None = None) -> Tensor | None:
        """Return what past tokens left, (B, t, …); None before the first.

        call: computes it from their inputs, for tokens before a crop; see `set`.
        """
        kept = self._kept.get(name)
        if kept is None and name in self._recorded:
            assert call is not None
            before, inputs, _ = self._recorded[name]
            _, kept = call(inputs, before, None)
            assert kept is not None
            self._kept[name] = kept
        return kept

    def set(self, name: str, kept: Tensor | None, inputs: Tensor | None = None) -> None:
        """Leave `kept` (B, t, …) to the next pass; raise ValueError for None, what no tokens leave.

        inputs: (B, T, …), of which `kept` is what the last t tokens amount to; None if nothing that
        is kept here can be cropped.
        """
        if kept is None:
            raise ValueError("`x` must have at least one token with a history, got none")
        self._new[name] = kept
        if self.crops:
            if inputs is None:
                raise ValueError(
                    f"`history` must be one with crops=0, got crops={self.crops}: what `{name}` "
                    "keeps is of all tokens"
                )
            before = self._kept.get(name)
            if name in self._recorded:
                recorded = self._recorded[name].joined(inputs, self.crops)
            else:
                recorded = _Recorded(before, inputs, kept.shape[1]).last(self.crops)
                if recorded.inputs is inputs:  # which is the caller's
                    recorded = recorded.each(torch.clone)
            self._new_recorded[name] = recorded
            self._new_tokens = inputs.shape[1]

    def crop(self, tokens: int) -> None:
        """Take back the last `tokens` tokens, as if they had never been seen.

        Raises ValueError if they are more than `crops`, or than were seen since `record`.
        """
        check_count("tokens", tokens, least=0, most=self.crops)
        self.begin()
        if not tokens or not (self._recorded or self._kept):  # nothing reads several tokens
            return
        check_count("tokens", tokens, least=0, most=self._tokens)
        self._tokens -= tokens
        recorded, self._recorded, self._kept = self._recorded, {}, {}
        for name, (before, inputs, span) in recorded.items():
            if inputs.shape[1] > tokens:
                self._recorded[name] = _Recorded(before, inputs[:, :-tokens], span)
            elif before is not None:
                self._kept[name] = before

    def record(self, crops: int) -> None:
        """From now on, let the last `crops` tokens be taken back, and none of those so far."""
        check_count("crops", crops, least=0)
        if self.static and crops:
            refuse("crops", "0 with static=True", crops, ("static",))
        self.begin()
        self.crops, self._tokens = crops, 0
        self._recorded = {name: kept.last(0) for name, kept in self._recorded.items()}

    def clone(self) -> History:
        """A copy, whose tensors are copies."""
        other = History(static=self.static, crops=self.crops)
        other._kept = {name: kept.clone() for name, kept in self._kept.items()}
        other._recorded = {name: r.each(torch.clone) for name, r in self._recorded.items()}
        other._tokens = self._tokens
        other._dtype = self._dtype
        return other

    def resolved(self, key: Hashable, resolve: Callable[[], Any]) -> Any:
        """Return what `resolve` computes, computed by the first pass with this key."""
        if self._resolved[0] != key:
            self._resolved = (key, resolve())
        return self._resolved[1]

    def select(self, rows: Tensor) -> None:
        """Replace the batch by the sequences `rows`, (B',) int64, to reorder or repeat them."""

        def chosen(kept: Tensor) -> Tensor:
            return kept.index_select(0, rows.to(kept.device))

        self.begin()
        self._new = {name: chosen(kept) for name, kept in self._kept.items()}
        self._new_recorded = {name: r.each(chosen) for name, r in self._recorded.items()}
        self.commit()

    @property
    def batch_size(self) -> int | None:
        """The number of sequences; None while nothing is kept."""
        kept = (*self._kept.values(), *(r.inputs for r in self._recorded.values()))
        return len(kept[0]) if kept else None
