"""Causal depthwise convolution over time, as a token read of one value channel computes it."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, TypeVar

from torch import Tensor

from ddl import functional
from ddl.results import ReadParameters, ReadResult

from .history import History

Result = TypeVar("Result")
Left = Tensor | None  # what tokens leave for the next


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
    if slot is None or weight.shape[1] == 1:  # nothing passes from a token to the next
        return functional.read_with(state, read, document_starts)[0].context

    def convolved(state: Tensor, pending: Left, starts: Tensor | None) -> tuple[ReadResult, Left]:
        return functional.read_with(state, read, starts, pending=pending, continues=True)

    return continued(slot, convolved, state, document_starts).context


def continued(
    slot: Slot,
    call: Callable[[Tensor, Left, Tensor | None], tuple[Result, Left]],
    inputs: Tensor,
    document_starts: Tensor | None = None,
) -> Result:
    """Call for tokens (B, T, …) that follow others, and keep what these leave to the next.

    call: takes the inputs, what past tokens left, and `document_starts`.
    """
    result, left = call(inputs, slot.history.get(slot.name, call), document_starts)
    slot.history.set(slot.name, left, inputs)
    return result
