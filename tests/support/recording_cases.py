"""Streams whose rewrites are recorded, and the same rewrites by the equations."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from ddl import DeltaStream, reference
from tests.support.helpers import normal, randomise_

B, T, D, L = 2, 5, 12, 4
F64 = torch.float64

VARIANTS: dict[str, dict[str, Any]] = {
    "ddl": {},
    "ddl-cc": {"value_channels": 3, "expand": "conv"},
    "ddl-tc": {"value_channels": 3, "compress": "token", "kernel_size": 3},
    "v-map": {"value_channels": 3, "mapping": "v", "direction": "flatten", "gate": "mlp"},
    "pooled": {"value_channels": 3, "gate_from": "convolved", "value": "constant"},
    "write-only": {"value_channels": 3, "erase": "none"},
    "scaled": {"value_channels": 3, "branch_scale": 0.7},
    "raw": {"value_channels": 3, "value": "sigmoid", "value_from": "compressed", "eps_k": 0.3},
}
variants = pytest.mark.parametrize("options", VARIANTS.values(), ids=VARIANTS)


def make(options: dict[str, Any], dtype: torch.dtype = F64) -> DeltaStream:
    """A stream of L linear sublayers with every parameter random."""
    sublayers = [nn.Linear(D, D, bias=False) for _ in range(L)]
    stream = DeltaStream(D, sublayers, **options).to(dtype)
    randomise_(stream, std=0.8)
    return stream


def embeddings(time: int = T, seed: int = 0, dtype: torch.dtype = F64) -> Tensor:
    return normal(B, time, D, seed=seed, dtype=dtype)


class Rewrite(NamedTuple):
    """Operands of a rewrite, and the state after it."""

    state: Tensor
    direction: Tensor
    value: Tensor
    gate: Tensor  # β
    erase: Tensor  # α: β, or 0
    after: Tensor


@torch.no_grad()
def by_hand(stream: DeltaStream, x: Tensor) -> Iterator[Rewrite]:
    """The rewrites of a stream, one after the other, with the rewrite of `ddl.reference`."""
    flat = stream.value_channels == 1
    X = stream.expand(x)
    X = X[..., None] if flat else X
    for read, sublayer, residual in zip(
        stream.reads, stream.sublayers, stream.residuals, strict=True
    ):
        h, raw = read(X[..., 0] if flat else X, return_compressed=True)
        k, v, gate, *_ = residual.write(X, sublayer(h), h, *residual.value_and_gate(h, raw))
        erased = gate if residual.erase == "tied" else torch.zeros_like(gate)
        given = {"eps_k": residual.eps_k, "erase": residual.erase}
        after = reference.rewrite(X, k, v, residual.branch_scale * gate, **given)
        yield Rewrite(X, k, v, gate, erased, after)
        X = after
