"""Causal depthwise convolution over time, as a token read of one value channel computes it."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

from ddl import functional
from ddl.results import ReadParameters

from .history import History

__all__ = ["Slot", "continue_in", "convolve"]


class Slot(NamedTuple):
    """A place in a history, where a convolution or mixer leaves what its next tokens need.

    history: of one batch of sequences. name: the module's own among those that share the history.
    """

    history: History
    name: str


def convolve(
    x: Tensor,
    weight: Tensor,
    slot: Slot | None = None,
    document_starts: Tensor | None = None,
    *,
    norm_eps: float | None = None,
) -> Tensor:
    """Map x (B, T, d) to y_t,i = Σ_s w_is x_{t−s,i}, s < K, zeros before t = 0, in the dtype of x.

    weight: w (d, K). slot: of a convolution that goes on; None means that zeros come before.
    document_starts: (B, T) bool, tokens before which there are zeros. norm_eps: y is divided by its
    root mean square; None for no norm.
    """
    state = x.unsqueeze(-1)  # one value channel
    read = ReadParameters(weight.unsqueeze(1), norm_eps=norm_eps, context_dtype=x.dtype)
    if slot is None or weight.shape[1] == 1:  # nothing goes on from a token to the next
        return functional.read_with(state, read, document_starts).context
    y, _, _ = continue_in(slot, functional.bind_cached_read(state, read), state, document_starts)
    return y


def continue_in(
    slot: Slot,
    call: Callable[..., tuple[Tensor, ...]],
    inputs: Tensor,
    document_starts: Tensor | None = None,
) -> tuple[Tensor, ...]:
    """Call for tokens (B, T, …) that follow others; return all but what these leave to the next.

    call: takes the inputs, what past tokens left, and `document_starts`; its last result is left.
    """
    *results, kept = call(inputs, slot.history.get(slot.name, call), document_starts)
    slot.history.set(slot.name, kept, inputs)
    return tuple(results)
