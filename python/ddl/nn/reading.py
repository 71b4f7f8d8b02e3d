"""Expansion, read, and rewrite with the read after it, of a sequence or of tokens after others.

For streams whose blocks are called one by one, by a forward that is not ours. Without a slot a
sequence begins; with one, what past tokens left is looked up there, and what these leave is put.
`starts` (B, T) bool: the tokens with which a document starts, for what reads several tokens.
"""

from __future__ import annotations

from torch import Tensor

from ddl import functional
from ddl.results import Chain, ReadParameters, Write

from .convolution import Slot, continue_in
from .expand import Expand
from .linear import form_parameters

__all__ = ["Reading", "expanded", "read_from", "rewritten_and_read"]

# Context, and the value and gate that the read computed; see ReadResult.
Reading = tuple[Tensor, Tensor | None, Tensor | None]


def expanded(expand: Expand, x: Tensor, slot: Slot | None, starts: Tensor | None = None) -> Tensor:
    """Expand x (B, T, d) to a state (B, T, d, m), also if m = 1."""
    form_parameters(expand)
    weight, m = expand.weight, expand.value_channels
    if slot is None or weight is None or weight.shape[-1] == 1:
        state: Tensor = expand(x, document_starts=starts)
        return state.unsqueeze(-1) if m == 1 else state
    opens = functional.bind_cached_expand(x, weight, value_channels=m)
    (state,) = continue_in(slot, opens, x, starts)
    return state


def read_from(
    state: Tensor, parameters: ReadParameters, slot: Slot | None, starts: Tensor | None = None
) -> Reading:
    """Read a state X (B, T, d, m)."""
    starts = starts if parameters.over_time() else None
    if slot is None or not parameters.looks_back():
        context, value, gate = functional.read_with(state, parameters, starts)
        return context, value, gate
    read = functional.bind_cached_read(state, parameters)
    context, value, gate = continue_in(slot, read, state, starts)
    return context, value, gate


def rewritten_and_read(
    state: Tensor,
    write: Write,
    parameters: ReadParameters,
    slot: Slot | None,
    *,
    chain: Chain | None = None,
    starts: Tensor | None = None,
) -> tuple[Tensor, Reading, Chain | None]:
    """Rewrite a state X (B, T, d, m) and read the new one, in one pass; return it and its read.

    chain: as in `functional.step`; the next one is returned, too.
    """
    if slot is None or not parameters.looks_back():
        starts = starts if parameters.over_time() else None
        (new, context, value, gate), chain = functional.step(
            state, write, parameters, chain=chain, document_starts=starts
        )
        return new, (context, value, gate), chain
    new = functional.write_to(state, write)
    return new, read_from(new, parameters, slot, starts), None
