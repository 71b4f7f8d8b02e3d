"""The loop over the sublayers of a stream, and its parts.

Blocks that are called one by one, by a forward that is not ours, use the parts: `opened` and
`boundary`. Without a slot a sequence begins; with one, what past tokens left is looked up there,
and what these leave is put there. `starts` (B, T) bool: the tokens with which a document starts,
for what reads several tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import zip_longest
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


# A read, and the sublayer that gets it with its residual; both None after the last read. A slot
# follows read and residual: where past tokens leave something for it; None without a history, or if
# nothing is left.
Step = tuple[ReadParameters, Slot | None, nn.Module | None, DeltaResidual | None, Slot | None]


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
    for index, (read, read_slot, sublayer, next_residual, next_slot) in enumerate(steps):
        try:
            if residual is not None:
                write = residual.write(state, written, context, value, gate, keep, starts, slot)
                if residual.hooks or residual.branch_scale != 1:
                    continues = history is not None
                    write = residual.hooked(state, write, keep=keep, continues=continues)
            (state, after, value, gate), chain = boundary(
                state, write, read, starts, chain=chain, slot=read_slot
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
    """The steps of a stream with the parameters that it has now."""
    reads, residuals = stream.resolved(dtype)
    steps: list[Step] = []
    for index, (read, sublayer, residual) in enumerate(
        zip_longest(reads, stream.sublayers, residuals)
    ):
        read_slot = residual_slot = None
        if history is not None and read.looks_back():
            read_slot = Slot(history, f"reads.{index}")
        if history is not None and residual is not None and residual.gate_pool is not None:
            residual_slot = Slot(history, f"residuals.{index}")
        steps.append((read, read_slot, sublayer, residual, residual_slot))
    return steps


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
    if slot is None:
        state: Tensor = expand(x, document_starts=starts)
        return state.unsqueeze(-1) if m == 1 else state
    if weight is None:
        return x.unsqueeze(-1) if m == 1 else functional.expand_to(x, None, m)[0]
    if weight.shape[-1] == 1:
        return functional.expand_to(x, weight, m, starts)[0]

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
