"""History: past inputs of the convolutions over time, so that a stream can run token by token."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["History"]


class History:
    """The last K − 1 input tokens of every convolution over time in a stream.

    Convolved inputs are the embeddings (expand="conv"), the states of each read with token
    compression, and the pooled states of convolved gates. Before the first token they are zero, as
    in the convolutions themselves. A History belongs to one batch of sequences;
    `stream(x, history=history)` reads and extends it. A stream without such convolutions leaves it
    empty.

    Tokens added since `begin` count only after `commit`, so a forward pass that an error or Ctrl-C
    interrupts can be repeated.
    """

    def __init__(self) -> None:
        self._tails: dict[str, Tensor] = {}
        self._new: dict[str, Tensor] = {}  # from the current forward pass

    def __contains__(self, name: str) -> bool:
        return name in self._tails

    def begin(self) -> None:
        """Start a forward pass: discard additions that were not committed."""
        self._new = {}

    def commit(self) -> None:
        """Keep the additions since `begin`."""
        self._tails.update(self._new)
        self._new = {}

    def window(self, name: str, new: Tensor, taps: int) -> Tensor:
        """Return new (B, T, …) preceded by the `taps` − 1 tokens before it: (B, taps − 1 + T, …).

        The last `taps` − 1 tokens of the result are stored for the next pass.
        """
        joined = torch.cat((self._tail(name, new, taps), new), dim=1)
        self._keep(name, joined, taps)
        return joined

    def remember(self, name: str, new: Tensor, taps: int) -> None:
        """Store the last `taps` − 1 tokens as `window` does, without copying a long `new`."""
        if new.shape[1] >= taps - 1:
            self._keep(name, new, taps)
        else:
            self.window(name, new, taps)

    def select(self, rows: Tensor) -> None:
        """Replace the batch by the sequences `rows`, (B',) int64, to reorder or repeat them."""
        self._tails = {name: tail.index_select(0, rows) for name, tail in self._tails.items()}

    def _tail(self, name: str, new: Tensor, taps: int) -> Tensor:
        if name in self._tails:
            return self._tails[name]
        return new.new_zeros(new.shape[0], taps - 1, *new.shape[2:])

    def _keep(self, name: str, tokens: Tensor, taps: int) -> None:
        # A view would keep the memory of all tokens allocated.
        self._new[name] = tokens[:, tokens.shape[1] - (taps - 1) :].clone()
