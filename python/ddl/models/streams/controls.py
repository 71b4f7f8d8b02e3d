"""The controls of DDL: additions to a stream whose reads are those of a delta stream.

Of token compression (additive-conv): each read is convolved over time,

    x ← x + F(norm(c ∗ x)),    (c ∗ x)_t = Σ_{s<K} c_s ∘ x_{t−s},    c (d, K)

The causal depthwise convolutions c start as the identity. Of width (expanded): all value channels
are added to,

    h = norm(Σ_j w_j ∘ X_j)                      X (d, m), m copies of the embedding at first
    b = β v,  β = 2 sigmoid(u · h + c),  v = W h + a    (m,)
    X ← X + s F(h) bᵀ

β and a start as 1, w as 1/m. Consecutive sublayers share c or w (d, m), as DDL-TC and DDL-CC share
theirs; the last read has one for itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ddl.nn.additions import AddingStream, Addition
from ddl.nn.checks import require_exact_type, require_own_forward
from ddl.nn.convolution import Slot
from ddl.nn.gate import reset_gate, squash
from ddl.nn.history import History
from ddl.nn.linear import Projection, form_parameters, project, projection_of, reset_
from ddl.nn.padding import without_padding
from ddl.nn.read import Read, make_reads
from ddl.nn.trunk import boundary
from ddl.ops.checks import autocast_dtype
from ddl.options import Compress
from ddl.results import ReadParameters

from ..sublayers import wide


class _ReadStream(AddingStream):
    """A stream of m value channels with a Read before each sublayer, and a last one.

    residuals: one for each sublayer, or none. options: of Read.
    """

    def __init__(
        self,
        hidden_size: int,
        value_channels: int,
        sublayers: Iterable[nn.Module],
        residuals: Iterable[nn.Module] = (),
        *,
        compress: Compress,
        sublayers_per_compressor: int,
        norm_eps: float,
        **options: Any,
    ) -> None:
        super().__init__(sublayers)
        common: dict[str, Any] = {"compress": compress, "norm_eps": norm_eps}
        self.reads = make_reads(
            hidden_size,
            value_channels,
            sublayers=len(self.sublayers),
            sublayers_per_compressor=sublayers_per_compressor,
            own=options,
            **common,
        )
        self.residuals = nn.ModuleList(residuals)
        self.readout = Read(hidden_size, value_channels, **options, **common)


class ConvolvedStream(_ReadStream):
    """Additions to a stream whose reads are token reads of one value channel.

    reads: `sublayers_per_compressor`, the consecutive sublayers that share a convolution, and
    options of Read.
    """

    def __init__(self, hidden_size: int, sublayers: Iterable[nn.Module], **reads: Any) -> None:
        super().__init__(hidden_size, 1, sublayers, compress="token", **reads)

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
        return read(len(self.sublayers), x)

    def read_out(self, state: Tensor) -> Tensor:
        """Map a state (B, T, d, 1) to the final read (B, T, d)."""
        h: Tensor = self.readout(state.squeeze(-1))
        return h

    def _reads(
        self, like: Tensor, history: History | None, document_starts: Tensor | None
    ) -> Callable[[int, Tensor], Tensor]:
        """The read before each sublayer, by its number, and the last one; after `history`."""
        named = {f"reads[{index}]": read for index, read in enumerate(self.reads)}
        named["readout"] = self.readout
        if history is None:
            every = [require_own_forward(name, read, Read) for name, read in named.items()]
            return lambda index, x: every[index](x, document_starts=document_starts)
        dtype = autocast_dtype(like)

        def resolve() -> Iterator[ReadParameters]:
            for name, module in named.items():
                read = require_exact_type(name, module, Read)
                form_parameters(read)
                yield read.parameters_of(read.effective_weight(), dtype)

        key = (id(self), torch.compiler.is_compiling(), like.dtype, dtype)
        parameters = history.resolved(key, lambda: list(resolve()))

        def read(index: int, x: Tensor) -> Tensor:
            slot = Slot(history, f"reads.{index}")
            state = x.unsqueeze(-1)
            result, _ = boundary(state, None, parameters[index], document_starts, slot=slot)
            return result.context

        return read


class ChannelWeights(nn.Module):
    """b = β v of a context, the weight of the sublayer's output in each value channel."""

    def __init__(self, hidden_size: int, value_channels: int) -> None:
        super().__init__()
        self.gate = Projection(hidden_size, 1)  # u and c
        self.value = Projection(hidden_size, value_channels)  # W and a
        self.reset_parameters()

    def never_decayed(self) -> Iterator[nn.Parameter]:
        """Zero is not a neutral value for any of the parameters, as in DeltaResidual."""
        return self.parameters()

    def reset_parameters(self) -> None:
        reset_(self.value, bias=1.0)
        reset_gate(self.gate, beta_init=1.0)

    def forward(self, h: Tensor) -> Tensor:
        """Map h (…, d) to b (…, m), in float32 (float64 for float64)."""
        gate, value = projection_of("gate", self.gate), projection_of("value", self.value)
        beta = squash(project(h, gate.weight, gate.bias))
        return beta.unsqueeze(-1) * project(h, value.weight, value.bias)


class ExpandedStream(_ReadStream):
    """Additions to a stream of m value channels, with a weight for each channel.

    value_channels: m. branch_scale: s. reads: as of ConvolvedStream.
    """

    def __init__(
        self,
        hidden_size: int,
        sublayers: nn.ModuleList,
        *,
        value_channels: int,
        branch_scale: float,
        **reads: Any,
    ) -> None:
        weights = [ChannelWeights(hidden_size, value_channels) for _ in sublayers]
        super().__init__(
            hidden_size, value_channels, sublayers, weights, compress="channel", **reads
        )
        self.value_channels, self.branch_scale = value_channels, branch_scale

    def forward(self, x: Tensor, *args: Any, keep: Tensor | None = None, **_: Any) -> Tensor:
        """Map embeddings x (B, T, d) to the final read (B, T, d); as AdditiveStream."""
        state = x.unsqueeze(-1).expand(*x.shape, self.value_channels)
        parts = zip(self.reads, self.sublayers, self.residuals, strict=True)
        for i, (read, sublayer, residual) in enumerate(parts):
            h = plain_read(f"reads[{i}]", read, state)
            written, join = sublayer(h, *args), self.branch_scale * residual(h)
            if self.hooks:
                self.show(Addition(i, state, written, None, join, keep))
            state = (state + written.unsqueeze(-1) * join.unsqueeze(-2)).to(state.dtype)
        return self.read_out(state)

    def read_out(self, state: Tensor) -> Tensor:
        """Map a state (B, T, d, m) to the final read (B, T, d)."""
        return plain_read("readout", self.readout, state)


def plain_read(name: str, read: nn.Module, state: Tensor) -> Tensor:
    """Read X (…, d, m) as a channel `Read` does, without the operator: h (…, d), in X's dtype."""
    read = require_exact_type(name, read, Read)
    form_parameters(read)
    weight, norm_weight = read.effective_weight(), read.norm_weight
    assert weight is not None
    assert norm_weight is not None
    x = (wide(state) * wide(weight)).sum(-1)
    return F.rms_norm(x, x.shape[-1:], wide(norm_weight), read.norm_eps).to(state.dtype)
