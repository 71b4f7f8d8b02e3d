"""A model on `ddl.reference` in float64: what the blocks and models have to compute."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from ddl import reference
from ddl.models import GPT
from ddl.models.streams.convolved import ConvolvedStream
from ddl.nn import DeltaResidual, DeltaStream, Expand, Read


class ReferenceStream(nn.Module):
    """A `DeltaStream` on `ddl.reference`, with the modules and parameters of `stream`.

    It covers the model variants: k-Map, with value and gate from the read's context.
    """

    def __init__(self, stream: DeltaStream) -> None:
        super().__init__()
        self.sublayers, self.expand, self.reads = stream.sublayers, stream.expand, stream.reads
        self.residuals, self.readout = stream.residuals, stream.readout

    def forward(self, x: Tensor, *args: Any, **nothing: Any) -> Tensor:
        """x (B, T, d) → the normalised final read (B, T, d); one document per sequence."""
        assert isinstance(self.expand, Expand)
        assert isinstance(self.readout, Read)
        X = reference.expand(x, self.expand.weight, value_channels=self.expand.value_channels)
        for read, sublayer, residual in zip(
            self.reads, self.sublayers, self.residuals, strict=True
        ):
            assert isinstance(read, Read)
            assert isinstance(residual, DeltaResidual)
            own = read.parameters_of(read.effective_weight())
            h, value, beta = reference.read(X, **residual.added_to(own).keywords())
            assert value is not None
            assert beta is not None
            write = residual.write(X, sublayer(h, *args), h, value, residual.branch_scale * beta)
            X = reference.rewrite(X, *write[:3], eps_k=residual.eps_k, erase=residual.erase)
        readout = self.readout.parameters_of(self.readout.effective_weight())
        return reference.read(X, **readout.keywords()).context


class ReferenceConvolved(nn.Module):
    """A `ConvolvedStream` on `ddl.reference`, with the modules and parameters of `stream`."""

    def __init__(self, stream: ConvolvedStream) -> None:
        super().__init__()
        self.sublayers, self.reads, self.readout = stream.sublayers, stream.reads, stream.readout

    def forward(self, x: Tensor, *args: Any, **nothing: Any) -> Tensor:
        """x (B, T, d) → the normalised final read (B, T, d); one document per sequence."""
        for read, sublayer in zip(self.reads, self.sublayers, strict=True):
            x = x + sublayer(_read(read, x), *args)
        return _read(self.readout, x)


def _read(read: nn.Module, x: Tensor) -> Tensor:
    assert isinstance(read, Read)
    parameters = read.parameters_of(read.effective_weight())
    return reference.read(x.unsqueeze(-1), **parameters.keywords()).context


def exact(model: GPT) -> GPT:
    """A copy of the model in float64, on a GPU if the model is. Delta streams and token reads run
    on the reference, the other baselines on their own code."""
    made: Any = copy.deepcopy(model).to(torch.float64)
    if isinstance(made.trunk, DeltaStream):
        made.trunk = ReferenceStream(made.trunk)
    elif isinstance(made.trunk, ConvolvedStream):
        made.trunk = ReferenceConvolved(made.trunk)
    return made
