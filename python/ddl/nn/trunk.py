"""The loop over the sublayers of a stream, and its parts.

Blocks that are called one by one, by a forward that is not ours, use the parts: `opened`,
`read_from` and `rewritten`. Without a slot a sequence begins; with one, what past tokens left is
looked up there, and what these leave is put there. `starts` (B, T) bool: the tokens with which a
document starts, for what reads several tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from ddl import functional
from ddl.ops.checks import autocast_dtype
from ddl.options import StreamDtype, spread_anchors
from ddl.results import Chain, ReadParameters, ReadResult, RewriteReadResult, Write

from .checks import check_returned
from .convolution import Slot, continued
from .expand import Expand
from .history import History
from .linear import form_parameters
from .residual import DeltaResidual

__all__ = ["Call", "as_stream", "first_chain", "opened", "read_from", "rewritten", "run"]

Call = Callable[[int, nn.Module, Tensor], Tensor]  # F(h) of a sublayer, by its number


class Stream(Protocol):
    """The parts of a DeltaStream that the loop uses."""

    expand: Expand
    sublayers: nn.ModuleList
    anchor_every: int | None

    def parameters(self) -> Iterator[nn.Parameter]: ...
    def resolved(self, x: Tensor) -> tuple[list[ReadParameters], list[DeltaResidual]]: ...


def run(
    stream: Stream,
    x: Tensor,
    call: Call,
    *,
    history: History | None = None,
    keep: Tensor | None = None,
    starts: Tensor | None = None,
) -> Tensor:
    """Map embeddings x (B, T, d) to the final read (B, T, d).

    history: of the tokens before; None for whole sequences. keep: (B, T) bool, False for padding.
    """
    if history is None:
        reads, residuals = stream.resolved(x)
    else:
        history.begin(x.dtype)
        key = (id(stream), torch.compiler.is_compiling(), x.dtype, autocast_dtype(x))
        reads, residuals = history.resolved(key, lambda: stream.resolved(x))
    state = opened(stream.expand, x, starts, _slot(history, "expand"))
    context, value, gate = read_from(state, reads[0], starts, _slot(history, "reads.0"))
    chain = None
    if history is None:
        chain = first_chain(state, stream.anchor_every, len(residuals))
    for index, (sublayer, residual) in enumerate(zip(stream.sublayers, residuals, strict=True)):
        written = call(index, sublayer, context)
        slot = None if residual.gate_pool is None else _slot(history, f"residuals.{index}")
        try:
            write = residual.write(
                state, written, context, value, gate, keep=keep, document_starts=starts, slot=slot
            )
            if residual.hooks or residual.branch_scale != 1:
                continues = history is not None
                write = residual.hooked(state, write, keep=keep, continues=continues)
            read, slot = reads[index + 1], None
            if history is not None and read.looks_back():
                slot = Slot(history, f"reads.{index + 1}")
            (state, after, value, gate), chain = rewritten(
                state, write, read, starts, chain=chain, slot=slot
            )
        except (RuntimeError, TypeError, ValueError):
            check_returned(f"sublayers[{index}]", written, context)
            raise
        context = after
    if history is not None:
        history.commit()
    return context


def opened(
    expand: Expand, x: Tensor, starts: Tensor | None = None, slot: Slot | None = None
) -> Tensor:
    """Expand x (B, T, d) to a state (B, T, d, m), also if m = 1."""
    form_parameters(expand)
    weight, m = expand.weight, expand.value_channels
    if slot is None or weight is None or weight.shape[-1] == 1:
        state: Tensor = expand(x, document_starts=starts)
        return state.unsqueeze(-1) if m == 1 else state

    def expanded(x: Tensor, before: Tensor | None, starts: Tensor | None) -> Any:
        return functional.expand_to(x, weight, m, starts, before=before, continues=True)

    state = continued(slot, expanded, x, starts)
    assert isinstance(state, Tensor)
    return state


def read_from(
    state: Tensor,
    read: ReadParameters,
    starts: Tensor | None = None,
    slot: Slot | None = None,
) -> ReadResult:
    """Read a state X (B, T, d, m)."""
    if not read.over_time():
        starts = None
    if slot is None or not read.looks_back():
        return functional.read_with(state, read, starts)[0]
    result: ReadResult = continued(slot, partial(_read_on, read), state, starts)
    return result


def rewritten(
    state: Tensor,
    write: Write,
    read: ReadParameters,
    starts: Tensor | None = None,
    *,
    chain: Chain | None = None,
    slot: Slot | None = None,
) -> tuple[RewriteReadResult, Chain | None]:
    """Rewrite a state X (B, T, d, m) and read the new one, in one pass over memory: the boundary
    between two sublayers.

    chain: the rewrites that led to the state, so that not every one is stored for the backward; the
    chain for the next boundary is returned, too.
    """
    if not read.over_time():
        starts = None
    if slot is None or not read.looks_back():
        return functional.step(state, write, read, starts, chain=chain)
    pending = slot.history.get(slot.name, partial(_read_on, read))
    result, left = functional.step(state, write, read, starts, pending=pending, continues=True)
    slot.history.set(slot.name, left, result.state)
    return result, None


def _read_on(
    read: ReadParameters, state: Tensor, pending: Tensor | None, starts: Tensor | None
) -> tuple[ReadResult, Tensor | None]:
    """Read tokens that follow others; the second result is what they leave."""
    return functional.read_with(state, read, starts, pending=pending, continues=True)


def _slot(history: History | None, name: str) -> Slot | None:
    return None if history is None else Slot(history, name)


def as_stream(x: Tensor, dtype: StreamDtype | None) -> Tensor:
    """Convert embeddings to the dtype that the states have under autocast, if it is on."""
    if dtype is None or autocast_dtype(x) is None:
        return x
    return x.to(getattr(torch, dtype))


def first_chain(state: Tensor, anchor_every: int | None, sublayers: int) -> Chain | None:
    """Begin the chain of a stream; None if every state is stored.

    state: X (B, T, d, m), the first one, whose device decides if anchor_every is None. sublayers:
    number of sublayers of the whole stream.
    """
    if not torch.is_grad_enabled():
        return None
    every = anchor_every or spread_anchors(sublayers, state.shape[-1], state.device.type)
    return Chain(every) if every > 1 else None
