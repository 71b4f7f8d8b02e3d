"""The cached step of a stream: its calls, resolved once per generated text.

A step has little arithmetic, and comes after a sublayer whose weights have passed through the
caches: each Python object that it looks at is fetched from memory again. So what does not change
from token to token is put into one tuple per sublayer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn

from ddl import functional
from ddl.ops.checks import autocast_dtype
from ddl.results import ReadParameters

from .checks import check_returned, require_exact_type
from .convolution import Slot
from .expand import Expand
from .history import History
from .hooks import generation
from .linear import form_parameters
from .padding import without_padding
from .residual import DeltaResidual

__all__ = ["Call", "continued"]

Call = Callable[[int, nn.Module, Tensor], Tensor]  # F(h) of a sublayer, by its number


class Stream(Protocol):
    """The parts of a DeltaStream that are used here; its own room is above this one."""

    expand: Expand
    sublayers: nn.ModuleList
    reads: nn.ModuleList

    def parameters(self) -> Iterator[nn.Parameter]: ...
    def parameters_of_calls(
        self, dtype: torch.dtype
    ) -> tuple[list[ReadParameters], list[DeltaResidual]]: ...


def continued(
    stream: Stream,
    x: Tensor,
    history: History,
    keep: Tensor | None,
    document_starts: Tensor | None,
    call: Call,
) -> Tensor:
    """Run a stream on tokens x (B, T, d) that follow those in `history`."""
    if torch.is_grad_enabled() and any(p.requires_grad for p in stream.parameters()):
        raise ValueError(
            "`history` must be used under torch.no_grad() or torch.inference_mode(), got a "
            "forward pass with gradients"
        )
    if history.crops and document_starts is not None:
        raise ValueError(
            "`history` must be one with crops=0 beside `document_starts`, got "
            f"crops={history.crops}: what is computed again after a crop knows of no starts"
        )
    history.begin(x.dtype)
    step = history.resolved(
        (id(stream), torch.compiler.is_compiling(), generation(), x.dtype, autocast_dtype(x)),
        lambda: _resolve(stream, x),
    )
    context: Tensor = step.run(x, history, keep, document_starts, call)
    history.commit()
    return context


class Boundary(NamedTuple):
    """A sublayer, and what follows it: the rewrite with its output and the next read.

    residual: None if the read before computed value and gates as they are written, the direction is
        the output, and no hook is installed.
    step: the rewrite and the next read, bound to all their parameters. writing: the same without
        erasing, for a hook that sets that; None without hooks. name: of what the next read keeps;
        None for nothing. again: that read alone, for the tokens after a crop. read: the read
        before this sublayer, if the residual computes values and gates itself; else None.
    """

    number: int
    sublayer: nn.Module
    residual: DeltaResidual | None
    step: Callable[..., tuple[Tensor, ...]]
    writing: Callable[..., tuple[Tensor, ...]] | None
    name: str | None
    again: Callable[..., tuple[Tensor, ...]] | None
    read: nn.Module | None


class CachedStep(NamedTuple):
    """All calls of a stream that continues a sequence.

    expand: None if the state is x. Names as in Boundary.
    """

    expand: Callable[..., tuple[Tensor, ...]] | None
    expand_name: str | None
    read: Callable[..., tuple[Tensor, ...]]
    name: str | None
    boundaries: tuple[Boundary, ...]

    def run(
        self,
        x: Tensor,
        history: History,
        keep: Tensor | None,
        document_starts: Tensor | None,
        call: Call,
    ) -> Tensor:
        """Map embeddings x (B, T, d) to the final read (B, T, d), as `DeltaStream.forward`."""
        if self.expand is None:
            state = x.unsqueeze(-1)
        else:
            name = self.expand_name
            if name is None:
                state, _ = self.expand(x, None, None)
            else:
                state, before = self.expand(x, history.get(name, self.expand), document_starts)
                history.set(name, before, x)
        if self.name is None:
            context, value, gate, _ = self.read(state, None, None)
        else:
            pending = history.get(self.name, self.read)
            context, value, gate, pending = self.read(state, pending, document_starts)
            history.set(self.name, pending, state)
        for number, sublayer, residual, step, writing, name, again, read in self.boundaries:
            if residual is not None and read is not None:
                context, value, gate = residual.after_read(read, context, value, gate)
            written = direction = call(number, sublayer, context)
            if residual is not None:
                check_returned(f"sublayers[{number}]", written, context)
                write = residual.write(
                    *(state, written, context, value, gate),
                    keep=keep,
                    document_starts=document_starts,
                    slot=Slot(history, f"residuals.{number}"),
                )
                write = residual.hooked(state, write, keep=keep, continues=True)
                direction, value, gate, *_ = write
                if write.erase != residual.erase:
                    assert writing is not None
                    step = writing
            elif keep is not None:
                gate = without_padding(gate, keep)
            pending = starts = None
            if name is not None:
                pending, starts = history.get(name, again), document_starts
            try:
                result = step(state, direction, value, gate, pending, starts)
            except (TypeError, ValueError):
                check_returned(f"sublayers[{number}]", written, context)
                raise
            state, context, value, gate, pending = result
            if name is not None:
                history.set(name, pending, state)
        return context


def _resolve(stream: Stream, like: Tensor) -> CachedStep:
    """Resolve the calls for tensors like `like`."""
    expand = require_exact_type("expand", stream.expand, Expand)
    form_parameters(expand)
    reads, residuals = stream.parameters_of_calls(like.dtype)
    names = [f"reads.{i}" if read.looks_back() else None for i, read in enumerate(reads)]
    boundaries = []
    for index, (sublayer, residual) in enumerate(zip(stream.sublayers, residuals, strict=True)):
        bind = partial(functional.bind_cached_step, like, residual.eps_k, heads=residual.heads)
        step = bind(residual.erase, reads[index + 1])
        writing = bind("none", reads[index + 1]) if residual.hooks else None
        by_read = residual.reads_value and residual.reads_gate and residual.further is None
        by_read = by_read and residual.branch_scale == 1 and residual.heads == 1
        branch = None if by_read and not residual.hooks else residual
        read = stream.reads[index] if residual.heads > 1 else None
        name, again = names[index + 1], None
        if name is not None:
            again = functional.bind_cached_read(like, reads[index + 1])
        boundaries.append(Boundary(index, sublayer, branch, step, writing, name, again, read))
    m, weight = expand.value_channels, expand.weight
    opens = functional.bind_cached_expand(like, weight, value_channels=m)
    return CachedStep(
        None if m == 1 and weight is None else opens,
        None if weight is None or weight.shape[-1] == 1 else "expand",
        functional.bind_cached_read(like, reads[0]),
        names[0],
        tuple(boundaries),
    )
