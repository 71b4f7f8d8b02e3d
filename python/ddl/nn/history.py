"""History: what convolutions over time have seen, so that a stream can go on token by token."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["History"]


class History:
    """The last K − 1 tokens of everything that a stream convolves over time.

    These are the embeddings before an expansion by convolution, for each read with token
    compression the states that it compresses, and the pooled states of convolved gates. Before the
    first token there are zeros, as in the convolutions themselves. It belongs to one batch of
    sequences; `stream(x, history=history)` reads and extends it. A stream without convolutions over
    time leaves it empty.

    What a pass adds counts when the pass is over (`begin`, `commit`): one that is interrupted, by
    an error or by Ctrl-C, can be repeated.
    """

    def __init__(self) -> None:
        self._tails: dict[str, Tensor] = {}
        self._new: dict[str, Tensor] = {}  # of the current pass

    def __contains__(self, name: str) -> bool:
        return name in self._tails

    def begin(self) -> None:
        """Forget what a pass before this one added and did not commit."""
        self._new = {}

    def commit(self) -> None:
        """What was added since `begin` is part of the past."""
        self._tails.update(self._new)  # `|=` is what torch 2.6 cannot compile
        self._new = {}

    def window(self, name: str, new: Tensor, taps: int) -> Tensor:
        """new (B, T, …) behind the `taps` − 1 tokens before it → (B, taps − 1 + T, …).

        Its last `taps` − 1 tokens are what the next pass finds.
        """
        joined = torch.cat((self._tail(name, new, taps), new), dim=1)
        self._keep(name, joined, taps)
        return joined

    def remember(self, name: str, new: Tensor, taps: int) -> None:
        """The same without the window: a long `new` is not copied for its last tokens."""
        if new.shape[1] >= taps - 1:
            self._keep(name, new, taps)
        else:
            self.window(name, new, taps)

    def select(self, rows: Tensor) -> None:
        """Take these sequences, (B',) int64, in place of the batch: to reorder or repeat them."""
        self._tails = {name: tail.index_select(0, rows) for name, tail in self._tails.items()}

    def _tail(self, name: str, new: Tensor, taps: int) -> Tensor:
        if name in self._tails:
            return self._tails[name]
        return new.new_zeros(new.shape[0], taps - 1, *new.shape[2:])

    def _keep(self, name: str, tokens: Tensor, taps: int) -> None:
        # A view would keep all tokens alive.
        self._new[name] = tokens[:, tokens.shape[1] - (taps - 1) :].clone()
