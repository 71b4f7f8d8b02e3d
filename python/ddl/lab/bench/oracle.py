"""A model on other operators: `ddl.reference` in float64, or plain PyTorch."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from ddl import reference
from ddl.models import GPT
from ddl.models.streams.controls import ConvolvedStream
from ddl.nn import DeltaStream

from . import plain


class OtherStream(nn.Module):
    """A `DeltaStream` on the operators of `ops`, with the modules and parameters of `stream`.

    ops: `ddl.reference` or the module `plain`, which has the default kinds of value and gate alone.
    """

    def __init__(self, stream: Any, ops: Any) -> None:
        super().__init__()
        self.ops = ops
        self.sublayers, self.expand, self.reads = stream.sublayers, stream.expand, stream.reads
        self.residuals, self.readout = stream.residuals, stream.readout

    def forward(self, x: Tensor, *args: Any, **unused: Any) -> Tensor:
        """x (B, T, d) → the normalised final read (B, T, d); one document per sequence."""
        ops, channels = self.ops, self.expand.value_channels
        X = ops.expand(x, self.expand.weight, value_channels=channels)
        boundaries: Any = zip(self.reads, self.sublayers, self.residuals, strict=True)
        for read, sublayer, residual in boundaries:
            own = read.parameters_of(read.effective_weight())
            h, value, beta = ops.read(X, **residual.added_to(own).keywords())
            write = residual.write(X, sublayer(h, *args), h, value, residual.branch_scale * beta)
            X = ops.rewrite(X, *write[:3], eps_k=residual.eps_k, erase=residual.erase)
        return _context(ops, X, self.readout)


class OtherConvolved(nn.Module):
    """A `ConvolvedStream` on `ddl.reference`, with the modules and parameters of `stream`."""

    def __init__(self, stream: ConvolvedStream) -> None:
        super().__init__()
        self.sublayers, self.reads, self.readout = stream.sublayers, stream.reads, stream.readout

    def forward(self, x: Tensor, *args: Any, **unused: Any) -> Tensor:
        """x (B, T, d) → the normalised final read (B, T, d); one document per sequence."""
        for read, sublayer in zip(self.reads, self.sublayers, strict=True):
            x = x + sublayer(_context(reference, x.unsqueeze(-1), read), *args)
        return _context(reference, x.unsqueeze(-1), self.readout)


def _context(ops: Any, state: Tensor, read: Any) -> Tensor:
    context: Tensor = ops.read(
        state, **read.parameters_of(read.effective_weight()).keywords()
    ).context
    return context


def exact(model: GPT) -> GPT:
    """A copy of the model in float64, on a GPU if the model is. Delta streams and token reads run
    on the reference, the other baselines on their own code."""
    made: Any = copy.deepcopy(model).to(torch.float64)
    if isinstance(made.trunk, DeltaStream):
        made.trunk = OtherStream(made.trunk, reference)
    elif isinstance(made.trunk, ConvolvedStream):
        made.trunk = OtherConvolved(made.trunk)
    return made


def peer(model: GPT) -> GPT:
    """The same model on the same parameters, with its trunk in plain PyTorch."""
    other: Any = copy.copy(model)
    other._modules = dict(model._modules)  # the shallow copy shares the table of submodules
    other.trunk = OtherStream(model.trunk, plain)
    return other
