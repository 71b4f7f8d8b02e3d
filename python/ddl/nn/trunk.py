"""The loop over the sublayers of a stream, and its parts.

Blocks that are called one by one, by a forward that is not ours, use the parts: `opened` and
`boundary`. Without a slot a sequence begins; with one, what past tokens left is looked up there,
and what these leave is put there. `starts` (B, T) bool: the tokens with which a document starts,
for what reads several tokens.
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
from ddl.results import Chain, ReadParameters, RewriteReadResult, Write

from .checks import check_returned
from .convolution import Slot, continued
from .expand import Expand
from .history import History
from .linear import form_parameters
from .residual import DeltaResidual

__all__ = ["Call", "as_stream", "boundary", "first_chain", "opened", "run"]

Call = Callable[[int, nn.Module, Tensor], Tensor]  # F(h) of a sublayer, by its number


class Stream(Protocol):
    """The parts of a DeltaStream that the loop uses."""

    expand: Expand
    sublayers: nn.ModuleList
    anchor_every: int | None

    def parameters(self) -> Iterator[nn.Parameter]: ...
    def resolved(
        self, dtype: torch.dtype | None
    ) -> tuple[list[ReadParameters], list[DeltaResidual]]: ...


def run(
    stream: Stream,
    x: Tensor,
    call: Call,
    dtype: torch.dtype | None,
    *,
    history: History | None = None,
    keep: Tensor | None = None,
    starts: Tensor | None = None,
) -> Tensor:
    """Map embeddings x (B, T, d) to the final read (B, T, d).

    dtype: autocast's, of the contexts; None without. history: of the tokens before; None for whole
    sequences. keep: (B, T) bool, False for padding.
    """
    if history is None:
        reads, residuals = stream.resolved(dtype)
    else:
        _begin(history, stream, x, starts)
        key = (id(stream), torch.compiler.is_compiling(), x.dtype, dtype)
        reads, residuals = history.resolved(key, lambda: stream.resolved(dtype))
    slot = None if history is None else Slot(history, "expand")
    state = opened(stream.expand, x, starts, slot)
    chain = write = written = context = value = gate = None
    if history is None:
        chain = first_chain(state, stream.anchor_every, len(residuals))
    for index, read in enumerate(reads):
        try:
            if index > 0:
                slot = None if history is None else Slot(history, f"residuals.{index - 1}")
                write = _written(
                    residuals[index - 1], state, written, context, value, gate, keep, starts, slot
                )
            slot = None if history is None else Slot(history, f"reads.{index}")
            (state, after, value, gate), chain = boundary(
                state, write, read, starts, chain=chain, slot=slot
            )
        except (RuntimeError, TypeError, ValueError):
            if context is not None:
                check_returned(f"sublayers[{index - 1}]", written, context)
            raise
        context = after
        if index < len(residuals):
            written = call(index, stream.sublayers[index], context)
    if history is not None:
        history.commit()
    assert context is not None
    return context


def _written(
    residual: DeltaResidual,
    state: Tensor,
    written: Any,
    context: Any,
    value: Tensor | None,
    gate: Tensor | None,
    keep: Tensor | None,
    starts: Tensor | None,
    slot: Slot | None,
) -> Write:
    """What a sublayer's output writes, as the hooks leave it."""
    write = residual.write(
        state, written, context, value, gate, keep=keep, document_starts=starts, slot=slot
    )
    if not residual.hooks and residual.branch_scale == 1:
        return write
    return residual.hooked(state, write, keep=keep, continues=slot is not None)


def _begin(history: History, stream: Stream, x: Tensor, starts: Tensor | None) -> None:
    """Begin a pass that continues a sequence; raise ValueError if it cannot."""
    if torch.is_grad_enabled() and any(p.requires_grad for p in (x, *stream.parameters())):
        raise ValueError(
            "`history` must be used under torch.no_grad() or torch.inference_mode(), got a "
            "forward pass with gradients"
        )
    if history.crops and starts is not None:
        raise ValueError(
            "`history` must be one with crops=0 for `document_starts`, got "
            f"crops={history.crops}: a crop does not know where documents start"
        )
    history.begin(x.dtype)


def opened(
    expand: Expand, x: Tensor, starts: Tensor | None = None, slot: Slot | None = None
) -> Tensor:
    """Expand x (B, T, d) to a state (B, T, d, m), also if m = 1."""
    if expand._forward_pre_hooks:
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


def boundary(
    state: Tensor,
    write: Write | None,
    read: ReadParameters,
    starts: Tensor | None = None,
    *,
    chain: Chain | None = None,
    slot: Slot | None = None,
) -> tuple[RewriteReadResult, Chain | None]:
    """Rewrite a state X (B, T, d, m) and read the new one, in one pass over memory: what happens
    between two sublayers.

    write: None before the first sublayer, where nothing is rewritten. chain: the rewrites that led
    to the state, so that not every one is stored for the backward; the next one is returned, too.
    """
    if starts is not None and not read.over_time():
        starts = None
    if slot is None or not read.looks_back():
        return functional.step(state, write, read, starts, chain=chain)
    again = partial(_again, read)
    pending = slot.history.get(slot.name, again)
    result, left = functional.step(state, write, read, starts, pending=pending, continues=True)
    slot.history.set(slot.name, left, result.state)
    return result, None


def _again(
    read: ReadParameters, state: Tensor, pending: Tensor | None, starts: Tensor | None
) -> tuple[RewriteReadResult, Tensor | None]:
    """Read the tokens before a crop once more; the second result is what they leave."""
    return functional.step(state, None, read, starts, pending=pending, continues=True)


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
