"""History: what past tokens leave for the next, so that a stream can run token by token."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ddl.options import check_count, refuse

# (inputs (B, T, …), what was left before them, None) → (result, what they leave).
Recomputed = Callable[[Tensor, Tensor | None, None], tuple[Any, Tensor | None]]


class _Past(NamedTuple):
    """What past tokens leave for the next, (B, t, …), and the inputs that a crop computes it from.

    left: None after a crop, until it is computed. inputs: (B, T, …), the last of them, which can be
    taken back; None if none can. before: what was left to the first of `inputs`; None at the start
    of a sequence, or if there are more than can be taken back, by `span`, the number t that `left`
    depends on.
    """

    left: Tensor | None
    before: Tensor | None = None
    inputs: Tensor | None = None
    span: int = 0

    def last(self, crops: int) -> _Past:
        """Without the inputs that are not needed to take back `crops` of them."""
        if self.inputs is None or self.inputs.shape[1] < crops + self.span:
            return self
        inputs = self.inputs[:, self.inputs.shape[1] - crops - self.span :]
        return _Past(self.left, None, inputs.clone(), self.span)

    def each(self, change: Callable[[Tensor], Tensor]) -> _Past:
        """With a change of every tensor."""
        left, before, inputs = (None if x is None else change(x) for x in self[:3])
        return _Past(left, before, inputs, self.span)


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
        self.static = static
        self._tokens = 0  # that can be taken back now
        self._past: dict[str, _Past] = {}
        self._new: dict[str, _Past] = {}  # from the current forward pass
        self._dtype: torch.dtype | None = None
        self._resolved: tuple[Hashable, Any] = (None, None)  # a key, and what was resolved for it
        self.record(crops)

    def begin(self, dtype: torch.dtype | None = None) -> None:
        """Start a forward pass: discard what was set and not committed.

        dtype: of the states. Raises ValueError if it was another before.
        """
        if self._past and dtype not in (None, self._dtype):
            got = f"{dtype} after {self._dtype}"
            raise ValueError(f"`history` must be used in one dtype, got {got}")
        self._new, self._new_tokens = {}, 0
        self._dtype = dtype or self._dtype

    def commit(self) -> None:
        """Keep what was set since `begin`."""
        if self.static:
            for name, (left, *_) in self._new.items():
                assert left is not None
                place = self.get(name)
                place = torch.empty_like(left) if place is None else place
                self._new[name] = _Past(place.copy_(left))
        self._past |= self._new
        self._tokens = min(self.crops, self._tokens + self._new_tokens)
        self._new, self._new_tokens = {}, 0

    def get(self, name: str, call: Recomputed | None = None) -> Tensor | None:
        """Return what past tokens left, (B, t, …); None before the first.

        call: computes it from their inputs, for tokens before a crop; see `set`.
        """
        past = self._past.get(name)
        if past is None or past.left is not None:
            return None if past is None else past.left
        assert call is not None
        assert past.inputs is not None
        _, left = call(past.inputs, past.before, None)
        self._past[name] = _Past(left, *past[1:])
        return left

    def set(self, name: str, left: Tensor | None, inputs: Tensor | None = None) -> None:
        """Leave `left` (B, t, …) to the next pass; raise ValueError for None, what no tokens leave.

        inputs: (B, T, …), of which `left` is what the last t tokens amount to; None if nothing that
        is kept here can be cropped.
        """
        if left is None:
            raise ValueError("`x` must have at least one token with a history, got none")
        self._new[name] = _Past(left)
        if self.crops:
            if inputs is None:
                raise ValueError(
                    f"`history` must be one with crops=0, got crops={self.crops}: what `{name}` "
                    "keeps is of all tokens"
                )
            past = self._past.get(name, _Past(None))
            before, every = past.left, inputs.clone()  # `inputs` are the caller's
            if past.inputs is not None:
                before, every = past.before, torch.cat((past.inputs, inputs), 1)
            self._new[name] = _Past(left, before, every, left.shape[1]).last(self.crops)
            self._new_tokens = inputs.shape[1]

    def crop(self, tokens: int) -> None:
        """Take back the last `tokens` tokens, as if they had never been seen.

        Raises ValueError if they are more than `crops`, or than were seen since `record`.
        """
        check_count("tokens", tokens, least=0, most=self.crops)
        self.begin()
        if not tokens or not self._past:  # nothing reads several tokens
            return
        check_count("tokens", tokens, least=0, most=self._tokens)
        self._tokens -= tokens
        every, self._past = self._past, {}
        for name, (_, before, inputs, span) in every.items():
            if inputs is not None and inputs.shape[1] > tokens:
                self._past[name] = _Past(None, before, inputs[:, :-tokens], span)
            elif before is not None:
                self._past[name] = _Past(before)

    def record(self, crops: int) -> None:
        """From now on, let the last `crops` tokens be taken back, and none of those so far."""
        check_count("crops", crops, least=0)
        if self.static and crops:
            refuse("crops", "0 with static=True", crops, ("static",))
        self.begin()
        self.crops, self._tokens = crops, 0
        self._past = {name: past.last(0) for name, past in self._past.items()}

    def clone(self) -> History:
        """A copy, whose tensors are copies."""
        other = History(static=self.static, crops=self.crops)
        other._past = {name: past.each(torch.clone) for name, past in self._past.items()}
        other._tokens, other._dtype = self._tokens, self._dtype
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
        self._new = {name: past.each(chosen) for name, past in self._past.items()}
        self.commit()

    @property
    def batch_size(self) -> int | None:
        """The number of sequences; None while nothing is kept."""
        kept = (x for past in self._past.values() for x in past[:3] if x is not None)
        return next(map(len, kept), None)
