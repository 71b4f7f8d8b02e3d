"""Additions whose reads are convolved over time: the control of token compression.

    x ← x + F(norm(c ∗ x)),    (c ∗ x)_t = Σ_{s<K} c_s ∘ x_{t−s},    c (d, K)

The causal depthwise convolutions c are shared as DDL-TC shares its own: by several consecutive
sublayers; the last read has one for itself. They start as the identity.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from ddl.nn.additions import AddingStream, Addition
from ddl.nn.checks import require_exact_type, require_own_forward
from ddl.nn.convolution import Slot
from ddl.nn.history import History
from ddl.nn.linear import form_parameters
from ddl.nn.padding import without_padding
from ddl.nn.read import Read, make_reads
from ddl.nn.trunk import boundary
from ddl.ops.checks import autocast_dtype
from ddl.results import ReadParameters

__all__ = ["ConvolvedStream"]


class ConvolvedStream(AddingStream):
    """Additions to a stream whose reads are token reads of one value channel.

    sublayers_per_compressor: consecutive sublayers that share a convolution. options: of Read.
    """

    def __init__(
        self,
        hidden_size: int,
        sublayers: Iterable[nn.Module],
        *,
        sublayers_per_compressor: int,
        norm_eps: float,
        **options: Any,
    ) -> None:
        super().__init__()
        self.sublayers = nn.ModuleList(sublayers)
        common: dict[str, Any] = {"compress": "token", "norm_eps": norm_eps}
        self.reads = make_reads(
            hidden_size,
            1,
            sublayers=len(self.sublayers),
            sublayers_per_compressor=sublayers_per_compressor,
            own=options,
            **common,
        )
        self.readout = Read(hidden_size, 1, **options, **common)

    def reset_parameters(self) -> None:
        for read in (*self.reads, self.readout):
            read.reset_parameters()

    def forward(
        self,
        x: Tensor,
        *args: Any,
        history: History | None = None,
        keep: Tensor | None = None,
        document_starts: Tensor | None = None,
    ) -> Tensor:
        """Map embeddings x (B, T, d) to the final read (B, T, d); arguments as in DeltaStream."""
        if keep is not None:
            x = without_padding(x, keep)
        read = self._reads(x, history, document_starts)
        for i, sublayer in enumerate(self.sublayers):
            written = sublayer(read(i, x), *args)
            if keep is not None:  # else a convolution would carry padding into a token
                written = without_padding(written, keep)
            if self.hooks:
                self.show(Addition(i, x.unsqueeze(-1), written, None, None, keep))
            x = x + written
        h = read(len(self.sublayers), x)
        if history is not None:
            history.commit()
        return h

    def read_out(self, state: Tensor) -> Tensor:
        """Map a state (B, T, d, 1) to the final read (B, T, d)."""
        h: Tensor = self.readout(state.squeeze(-1))
        return h

    def _reads(
        self, like: Tensor, history: History | None, document_starts: Tensor | None
    ) -> Callable[[int, Tensor], Tensor]:
        """The read before each sublayer, by its number, and the last one; after `history`."""
        if history is None:
            every = [require_own_forward(name, read, Read) for name, read in self._named_reads()]
            return lambda index, x: every[index](x, document_starts=document_starts)
        history.begin(like.dtype)
        key = (id(self), torch.compiler.is_compiling(), like.dtype, autocast_dtype(like))
        parameters = history.resolved(key, lambda: self._read_parameters(like))

        def read(index: int, x: Tensor) -> Tensor:
            slot = Slot(history, f"reads.{index}")
            state = x.unsqueeze(-1)
            result, _ = boundary(state, None, parameters[index], document_starts, slot=slot)
            return result.context

        return read

    def _named_reads(self) -> Iterator[tuple[str, nn.Module]]:
        yield from ((f"reads[{index}]", read) for index, read in enumerate(self.reads))
        yield "readout", self.readout

    def _read_parameters(self, like: Tensor) -> list[ReadParameters]:
        """The parameters of every read."""
        dtype, parameters = autocast_dtype(like), []
        for name, read in self._named_reads():
            read = require_exact_type(name, read, Read)
            form_parameters(read)
            parameters.append(read.parameters_of(read.effective_weight(), dtype))
        return parameters
