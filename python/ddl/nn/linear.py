"""Projection: a linear layer whose parameters the fused operators read, computed in float32."""

from __future__ import annotations

import inspect
import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.prune import BasePruningMethod
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm

from ddl.ops.checks import check_dtype

from .checks import require_exact_type


class Projection(nn.Module):
    """W x + b, with nn.Linear's attribute names but without being an nn.Linear.

    So a model that initialises every nn.Linear, as nanoGPT's `apply(self._init_weights)` does,
    does not overwrite the initialisation of gates and values.
    """

    bias: nn.Parameter  # None without a bias, but annotated as in nn.Linear

    def __init__(self, size_in: int, size_out: int, *, bias: bool = True, **factory: Any) -> None:
        super().__init__()
        self.weight = empty_parameter(size_out, size_in, **factory)
        self.register_parameter("bias", empty_parameter(size_out, **factory) if bias else None)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)

    def extra_repr(self) -> str:
        size_out, size_in = self.weight.shape
        return f"{size_in} → {size_out}, bias={self.bias is not None}"


def empty_parameter(*size: int, **factory: Any) -> nn.Parameter:
    return nn.Parameter(torch.empty(size, **factory))


@torch.no_grad()
def reset_taps_(weight: Tensor, start: float = 1.0, tap: int = 0) -> None:
    """Let one tap of a convolution, along the last axis, be `start`, and the others 0."""
    weight.zero_()[..., tap].fill_(start)


def shown(module: nn.Module) -> str:
    """`extra_repr` of a module with its options as attributes: those not at their defaults.

    An option whose name a submodule has is the attribute with `_kind` after the name.
    """
    parts, attributes = [], vars(module)
    for name, parameter in inspect.signature(type(module)).parameters.items():
        option = attributes.get(f"{name}_kind", attributes.get(name, parameter.default))
        if option != parameter.default:
            parts.append(f"{name}={option:g}" if type(option) is float else f"{name}={option!r}")
    return ", ".join(parts)


def reset_(projection: Projection, bias: float = 0.0) -> None:
    """Draw the weight with std 0.5/√(size in), so that inputs of RMS 1 give outputs of RMS ½."""
    nn.init.normal_(projection.weight, std=0.5 / math.sqrt(projection.weight.shape[1]))
    if projection.bias is not None:
        nn.init.constant_(projection.bias, bias)


def projection_of(name: str, module: Any) -> Projection:
    """Return `module` with its parameters formed; raise TypeError if its forward was replaced."""
    projection = require_exact_type(name, module, Projection)
    if projection._forward_pre_hooks:
        form_parameters(projection)
    return projection


def form_parameters(module: nn.Module) -> None:
    """Compute the parameters that torch.nn.utils computes before every call of `module`."""
    for hook in module._forward_pre_hooks.values():
        if isinstance(hook, BasePruningMethod | SpectralNorm | WeightNorm):
            hook(module, ())


def project(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Compute W x + b and its gradients in float32 (float64 for float64), even under autocast."""
    check_dtype("x", x)  # not to convert integers
    dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
    x, weight = x.to(dtype), weight.to(dtype)
    bias = None if bias is None else bias.to(dtype)
    device = x.device.type
    if device == "meta" or not torch.is_autocast_enabled(device):
        return F.linear(x, weight, bias)
    return _OutsideAutocast.apply(x, weight, bias)


class _OutsideAutocast(torch.autograd.Function):
    """F.linear with autocast off in forward and backward.

    torch.compile traces a backward under the autocast state of the outer call, even if the forward
    switched it off (pytorch/pytorch#179804); F.linear's backward would then multiply in bfloat16.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.has_bias = bias is not None
        with torch.autocast(x.device.type, enabled=False):
            return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        x, weight = ctx.saved_tensors
        rows = grad.reshape(-1, grad.shape[-1])
        with torch.autocast(x.device.type, enabled=False):
            grad_weight = rows.mT @ x.reshape(-1, x.shape[-1])
            return grad @ weight, grad_weight, rows.sum(0) if ctx.has_bias else None
