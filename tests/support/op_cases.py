"""Arguments of the operators in float64; the tests round them."""

from __future__ import annotations

import torch
from torch import Tensor

F64, F32, BF16, F16 = torch.float64, torch.float32, torch.bfloat16, torch.float16


def inputs(batch: tuple[int, ...], d: int, m: int) -> dict[str, Tensor]:
    """float64 arguments of a rewrite; β covers [0, 2], both ends included."""
    gate = 2 * torch.rand(batch, dtype=F64)
    gate.flatten()[:2].copy_(torch.tensor([0.0, 2.0][: gate.numel()]))
    return {
        "state": torch.randn(*batch, d, m, dtype=F64),
        "direction": torch.randn(*batch, d, dtype=F64),
        "value": torch.randn(*batch, m, dtype=F64),
        "gate": gate,
    }


def parameters(d: int, m: int, compress: str, taps: int = 4) -> dict[str, Tensor | None]:
    """float64 parameters of a read, at a model's scale."""
    weight = {
        "identity": None,
        "channel": torch.randn(d, m, dtype=F64) / m,
        "token": torch.randn(d, m, taps, dtype=F64) / m,
    }[compress]
    return {
        "compress": weight,
        "norm_weight": 1 + torch.randn(d, dtype=F64) / 4,
        "gate_weight": torch.randn(d, dtype=F64) / d**0.5,
        "gate_bias": torch.randn((), dtype=F64),
        "value_weight": torch.randn(m, d, dtype=F64) / d**0.5,
        "value_bias": torch.randn(m, dtype=F64),
    }
