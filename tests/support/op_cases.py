"""Arguments of the operators in float64; the tests round them."""

from __future__ import annotations

import torch
from torch import Tensor

F64, F32, BF16, F16 = torch.float64, torch.float32, torch.bfloat16, torch.float16


def inputs(
    batch: tuple[int, ...], d: int, m: int, rewrites: int | None = None
) -> dict[str, Tensor]:
    """float64 arguments of a rewrite, or of several; β covers [0, 2], both ends included."""
    each = (*batch, *axis(rewrites))
    gate = 2 * torch.rand(each, dtype=F64)
    gate.flatten()[:2].copy_(torch.tensor([0.0, 2.0][: gate.numel()]))
    return {
        "state": torch.randn(*batch, d, m, dtype=F64),
        "direction": torch.randn(*each, d, dtype=F64),
        "value": torch.randn(*each, m, dtype=F64),
        "gate": gate,
    }


def axis(rewrites: int | None) -> tuple[int, ...]:
    """The axis that this many rewrites have in their operands; None for a single one without."""
    return () if rewrites is None else (rewrites,)


def parameters(
    d: int, m: int, compress: str, taps: int = 4, rewrites: int | None = None
) -> dict[str, Tensor | None]:
    """float64 parameters of a read, at a model's scale. rewrites: those to come."""
    each = axis(rewrites)
    weight = {
        "identity": None,
        "channel": torch.randn(d, m, dtype=F64) / m,
        "token": torch.randn(d, m, taps, dtype=F64) / m,
    }[compress]
    return {
        "compress": weight,
        "norm_weight": 1 + torch.randn(d, dtype=F64) / 4,
        "gate_weight": torch.randn(*each, d, dtype=F64) / d**0.5,
        "gate_bias": torch.randn(each, dtype=F64),
        "value_weight": torch.randn(*each, m, d, dtype=F64) / d**0.5,
        "value_bias": torch.randn(*each, m, dtype=F64),
    }
