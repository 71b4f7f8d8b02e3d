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
from .convolution import Slot, continued
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


# A read, and the sublayer that gets it with its residual; both None after the last read. The slot:
# where past tokens leave something for the residual; None without a history, or if nothing is left.
Step = tuple[ReadParameters, nn.Module | None, DeltaResidual | None, Slot | None]


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
    slot = None
    if history is None:
        steps = _steps(stream, dtype, None)
    else:
        _begin(history, stream, x, starts)
        key = (id(stream), torch.compiler.is_compiling(), x.dtype, dtype)
        steps = history.resolved(key, lambda: _steps(stream, dtype, history))
        slot = Slot(history, "expand")
    state = opened(stream.expand, x, starts, slot)
    residual = chain = write = value = gate = None
    written: Any = None
    context: Any = None
    if history is None:
        chain = first_chain(state, stream.anchor_every, len(steps) - 1)
    for index, (read, sublayer, next_residual, next_slot) in enumerate(steps):
        try:
            if residual is not None:
                write = residual.write(state, written, context, value, gate, keep, starts, slot)
                if residual.hooks or residual.branch_scale != 1:
                    continues = history is not None
                    write = residual.hooked(state, write, keep=keep, continues=continues)
            before = None if history is None else Slot(history, f"reads.{index}")
            (state, after, value, gate), chain = boundary(
                state, write, read, starts, chain=chain, slot=before
            )
        except (AttributeError, RuntimeError, TypeError, ValueError):
            if context is not None:
                check_returned(f"sublayers[{index - 1}]", written, context)
            raise
        context, residual, slot = after, next_residual, next_slot
        if sublayer is not None:
            written = call(index, sublayer, context)
    if history is not None:
        history.commit()
    result: Tensor = context
    return result


def _steps(stream: Stream, dtype: torch.dtype | None, history: History | None) -> list[Step]:
    """The steps of a stream with the parameters that it has now.

    dtype: of the contexts; None for the states'. A weight that reads share is computed once.
    """
    weights: dict[int, Tensor | None] = {}
    steps: list[Step] = []
    parts = zip(stream.reads, stream.sublayers, stream.residuals, strict=True)
    for index, (read, sublayer, residual) in enumerate(parts):
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
        parameters = residual.added_to(read.parameters_of(weights[id(owner)], dtype))
        slot = None
        if history is not None and residual.gate_pool is not None:
            slot = Slot(history, f"residuals.{index}")
        steps.append((parameters, sublayer, residual, slot))
    readout = require_exact_type("readout", stream.readout, Read)
    parameters = readout.parameters_of(readout.effective_weight(), dtype)
    return [*steps, (parameters, None, None, None)]


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
