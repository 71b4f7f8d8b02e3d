"""The sublayers of a model by name, and functions that see what each does to the stream."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from ddl.nn.additions import AddingStream, Addition
from ddl.nn.hooks import Rewrite
from ddl.nn.residual import DeltaResidual

__all__ = ["evaluating", "find_residuals", "has_rewrites", "hooks_of", "unwrapped"]

See = Callable[[str, Rewrite | Addition], object]


def unwrapped(model: nn.Module) -> nn.Module:
    """The model that torch.compile or DistributedDataParallel wraps, else `model` itself."""
    children = dict(model.named_children())
    if len(children) == 1 and {"_orig_mod", "module"} & children.keys():
        return unwrapped(*children.values())
    return model


def find_residuals(model: Any, *, expected: str = "a DeltaResidual") -> dict[str, DeltaResidual]:
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
        raise ValueError(f"`model` must have {expected}, got {got}")
    return found


def has_rewrites(model: Any) -> bool:
    """Whether the model has a DeltaResidual; else it has a stream to which its sublayers add.

    Raises:
        TypeError: `model` is no module. ValueError: it has neither.
    """
    if isinstance(model, nn.Module) and _streams(model):
        return False
    return bool(find_residuals(model, expected="a DeltaResidual or a stream of ddl's GPT"))


def hooks_of(model: nn.Module, see: See) -> list[tuple[Any, Callable[[Any], Any]]]:
    """Pairs for `ddl.nn.hooks.installed`: `see` is called with a sublayer's name and its rewrite or
    addition. Raises as `has_rewrites` does."""

    def hook(name: str) -> Callable[[Any], Any]:
        def pass_on(seen: Any) -> Any:
            see(f"{name}.{seen.sublayer}" if isinstance(seen, Addition) else name, seen)
            return seen

        return pass_on

    if has_rewrites(model):
        return [(residual, hook(name)) for name, residual in find_residuals(model).items()]
    return [(stream, hook(f"{name}.sublayers".lstrip("."))) for name, stream in _streams(model)]


def _streams(model: nn.Module) -> list[tuple[str, AddingStream]]:
    modules = unwrapped(model).named_modules()
    return [(name, module) for name, module in modules if isinstance(module, AddingStream)]


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Put a model in evaluation mode, and back in its own afterwards."""
    training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(training)
