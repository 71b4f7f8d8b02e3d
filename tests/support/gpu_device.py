"""The device and the arguments shared by tests on a GPU."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ddl import functional
from tests.support.helpers import by_name
from tests.support.op_cases import inputs, parameters

DEVICE = torch.device("cuda", 0)
EPS = {"eps_k": 0.1}
Tensors = dict[str, Tensor]


def arguments(
    batch: tuple[int, ...],
    d: int,
    m: int,
    compress: str,
    dtype: torch.dtype,
    device: torch.device = DEVICE,
) -> Tensors:
    """Leaves for `rewrite_read` on the device; value and gate are in float32 (float64)."""
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    drawn = inputs(batch, d, m) | parameters(d, m, compress)
    return {
        name: t.to(device, wide if name in ("value", "gate") else dtype).requires_grad_()
        for name, t in drawn.items()
        if t is not None
    }


def forward(leaves: Tensors) -> Tensors:
    """Outputs of `rewrite_read` by name."""
    return by_name(functional.rewrite_read(**leaves, **EPS))


def cotangents(outputs: Tensors) -> Tensors:
    """Random gradients of the outputs, the same at each call."""
    generator = torch.Generator(next(iter(outputs.values())).device).manual_seed(1)
    return {
        name: torch.randn(t.shape, generator=generator, dtype=t.dtype, device=t.device)
        for name, t in outputs.items()
    }


def backward(outputs: Tensors, leaves: Tensors, incoming: Tensors) -> Tensors:
    """Gradients of the leaves by name."""
    chosen: list[Any] = [outputs[name] for name in incoming]
    grads = torch.autograd.grad(chosen, list(leaves.values()), list(incoming.values()))
    return dict(zip(leaves, grads, strict=True))
