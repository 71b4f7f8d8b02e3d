"""The sublayers of a model whose residual is a rewrite, by name."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from ddl.nn.residual import DeltaResidual

__all__ = ["evaluating", "find_residuals", "unwrapped"]


def unwrapped(model: nn.Module) -> nn.Module:
    """The model that torch.compile or DistributedDataParallel wraps, else `model` itself."""
    for name in ("_orig_mod", "module"):
        inner = model._modules.get(name)
        if inner is not None and len(model._modules) == 1:
            return unwrapped(inner)
    return model


def find_residuals(model: Any) -> dict[str, DeltaResidual]:
    """Every DeltaResidual of a model by its name, in the model's order.

    Raises:
        TypeError: `model` is no module. ValueError: it has no DeltaResidual.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"`model` must be a torch.nn.Module, got {type(model).__name__}")
    modules = unwrapped(model).named_modules()
    found = {name: module for name, module in modules if isinstance(module, DeltaResidual)}
    if not found:
        got = f"a {type(unwrapped(model)).__name__} without"
        raise ValueError(f"`model` must have a DeltaResidual, got {got}")
    return found


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Put a model in evaluation mode, and back in its own afterwards."""
    training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(training)
