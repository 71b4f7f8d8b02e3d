"""The loop over the sublayers of a stream, and its parts.

Blocks that are called one by one, by a forward that is not ours, use the parts: `opened` and
`boundary`. Without a slot a sequence begins; with one, what past tokens left is looked up there,
and what these leave is put there. `starts` (B, T) bool: the tokens with which a document starts,
for what reads several tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from ddl import functional
from ddl.ops.checks import autocast_dtype
from ddl.options import StreamDtype, spread_anchors
from ddl.results import Chain, ReadParameters, RewriteReadResult, Write

from .checks import check_returned, require_exact_type
from .convolution import Left, Slot, continued
from .expand import Expand
from .history import History
from .linear import form_parameters
from .read import Read
from .residual import DeltaResidual

Call = Callable[[int, nn.Module, Tensor], Tensor]  # F(h) of a sublayer, by its number


class Stream(Protocol):
    """The parts of a DeltaStream that the loop uses."""

    expand: Expand
    reads: nn.ModuleList
    sublayers: nn.ModuleList
    residuals: nn.ModuleList
    readout: Read
    anchor_every: int | None

    def parameters(self) -> Iterator[nn.Parameter]: ...


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
        reads, residuals = _resolved(stream, dtype)
        expand_slot = first_slot = None
    else:
        _begin(history, stream, x, starts)
        key = (id(stream), torch.compiler.is_compiling(), x.dtype, dtype)
        reads, residuals = history.resolved(key, lambda: _resolved(stream, dtype))
        expand_slot, first_slot = Slot(history, "expand"), Slot(history, "reads.0")
    state = opened(stream.expand, x, starts, expand_slot)
    chain = None if history is not None else first_chain(state, stream.anchor_every, len(residuals))
    (state, context, value, gate), chain = boundary(
        state, None, reads[0], starts, chain=chain, slot=first_slot
    )
    parts = zip(stream.sublayers, residuals, reads[1:], strict=True)
    for index, (sublayer, residual, read) in enumerate(parts):
        written = call(index, sublayer, context)
        slot = read_slot = None
        if history is not None:
            slot = Slot(history, f"residuals.{index}") if residual.gate_pool is not None else None
            read_slot = Slot(history, f"reads.{index + 1}")
        try:
            write = residual.write(state, written, context, value, gate, keep, starts, slot)
            if residual.hooks or residual.branch_scale != 1:
                continues = history is not None
                write = residual.hooked(state, write, keep=keep, continues=continues)
            (state, context, value, gate), chain = boundary(
                state, write, read, starts, chain=chain, slot=read_slot
            )
        except (AttributeError, RuntimeError, TypeError, ValueError):
            check_returned(f"sublayers[{index}]", written, context)
            raise
    if history is not None:
        history.commit()
    return context


def _resolved(
    stream: Stream, dtype: torch.dtype | None
) -> tuple[list[ReadParameters], list[DeltaResidual]]:
    """The parameters of every read, the final one's last, and the residuals.

    dtype: of the contexts; None for the states'. A weight that reads share is computed once.
    """
    weights: dict[int, Tensor | None] = {}
    reads, residuals = [], []
    for index, (read, residual) in enumerate(zip(stream.reads, stream.residuals, strict=True)):
        read = require_exact_type(f"reads[{index}]", read, Read)
        residual = require_exact_type(f"residuals[{index}]", residual, DeltaResidual)
        owner = read._shared[0] if read._shared else read
        if owner is read:
            weights[id(read)] = read.effective_weight()
        elif read._forward_pre_hooks:
            form_parameters(read)
        if id(owner) not in weights:
            raise ValueError(
                f"`reads[{index}]` must share the compression of a read before it, got that of one "
                "that was replaced: replace it, too, by Read(…, shared=stream.reads[…])"
            )
        residuals.append(residual)
        reads.append(residual.added_to(read.parameters_of(weights[id(owner)], dtype)))
    readout = require_exact_type("readout", stream.readout, Read)
    return [*reads, readout.parameters_of(readout.effective_weight(), dtype)], residuals


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
    m = expand.value_channels
    if slot is None or expand.weight is None or expand.kernel_size == 1:
        state: Tensor = expand(x, document_starts=starts)
        return state.unsqueeze(-1) if m == 1 else state
    form_parameters(expand)
    weight = expand.weight

    def expanded(x: Tensor, before: Left, starts: Tensor | None) -> tuple[Tensor, Left]:
        return functional.expand_to(x, weight, m, starts, before=before, continues=True)

    return continued(slot, expanded, x, starts)


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

    def recomputed(state: Tensor, pending: Tensor | None, _: None) -> Any:  # before a crop
        return functional.step(state, None, read, pending=pending, continues=True)

    pending = slot.history.get(slot.name, recomputed)
    result, left = functional.step(state, write, read, starts, pending=pending, continues=True)
    slot.history.set(slot.name, left, result.state)
    return result, None


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
