"""Whether a model is another project's GPT, whose blocks add their sublayers and nothing else."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ddl.nn.adapters import forward_of

from .mixin import WithOptions


def check_model(
    model: Any,
    whose: str,
    needed: tuple[tuple[str, ...], tuple[str, ...]],
    block_modules: tuple[str, ...],
    formula: str,
    expected: Callable[..., Tensor],
) -> None:
    """Raise unless `model` has the modules of another project's GPT and is not converted yet.

    needed: the modules of the model, and of its `transformer`, whose blocks have `block_modules`
    and compute `formula`, as the function `expected` does.
    """
    if not isinstance(model, nn.Module):
        got = type(model).__name__
        if isinstance(model, type):
            got = f"the class {model.__name__}: `converted` takes a class"
        raise TypeError(f"`model` must be {whose}'s GPT, got {got}")
    if isinstance(model, WithOptions) and model.delta_args:
        raise ValueError(f"`model` must be {whose}'s GPT as it was made, got one already converted")
    _check_has("model", model, needed[0], whose)
    transformer: Any = model.transformer
    _check_has("model.transformer", transformer, needed[1], whose)
    listed = isinstance(transformer.h, nn.ModuleList)
    if not listed or len(transformer.h) == 0:
        got = "an empty one" if listed else type(transformer.h).__name__
        raise TypeError(f"`model.transformer.h` must be a ModuleList of blocks, got {got}")
    for i, block in enumerate(transformer.h):
        name = f"model.transformer.h[{i}]"
        _check_has(name, block, block_modules, whose)
        for other in (*block._modules, *block._parameters, *block._buffers):
            if other not in block_modules:
                known = ", ".join(block_modules)
                raise TypeError(f"`{name}` must have {known} and nothing else, got `{other}`")
        check_forward(name, block, transformer.wte.weight.shape[-1], formula, expected)


def _check_has(name: str, module: nn.Module, children: tuple[str, ...], whose: str) -> None:
    """Raise TypeError unless a module has children, as another project's model has them."""
    for child in children:
        if child not in module._modules:
            raise TypeError(
                f"`{name}` must have a module `{child}`, as in {whose}'s GPT before "
                f"torch.compile or DDP wraps it, got a {type(module).__name__} without it"
            )


class StandIn(nn.Module):
    """An elementwise function in a module's place; it notes what it got besides x."""

    def __init__(self, phase: int) -> None:
        super().__init__()
        self.phase = phase
        self.others: list[int] = []

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        self.others += [id(other) for other in (*args, *kwargs.values()) if other is not None]
        return torch.sin(3 * x + self.phase)


@torch.no_grad()
def check_forward(
    name: str, block: nn.Module, width: int, formula: str, expected: Callable[..., Tensor]
) -> None:
    """Raise TypeError unless the forward of a block computes `expected(block, x, …)`.

    Both run on copies of the block with functions in place of its modules, which have no
    parameters: the block's own may be zeros, on any device or on meta, and of any dtype.
    width: of x (B, T, width). formula: for the message.
    """
    x = torch.randn(
        *(2, 4, width),
        dtype=torch.float64,
        device="cpu",
        generator=torch.Generator("cpu").manual_seed(0),
    )
    if type(x) is not Tensor:  # a FakeTensor has no numbers to compare
        return
    got = "one that computes something else"
    try:
        forward: Any = forward_of(block)
        forward = getattr(forward, "_torchdynamo_orig_callable", forward)  # before torch.compile
        forward = getattr(forward, "__func__", forward)
        given = list(inspect.signature(forward).parameters.values())[2:]
        others = [object() for p in given if p.kind < p.VAR_POSITIONAL and p.default is p.empty]
        same = all(
            _agree(*(_run(f, block, mode, x, others) for f in (forward, expected)))
            for mode in (True, False)
        )
    except Exception as error:  # a forward can do anything with its modules
        same, got = False, f"one that raises {type(error).__name__}: {error}"
    if not same:
        raise TypeError(f"`{name}` must have a forward that computes {formula}, got {got}")


def _run(
    forward: Callable[..., Any], block: nn.Module, training: bool, x: Tensor, others: list[Any]
) -> tuple[Any, list[list[int]]]:
    """Return the output of a forward, and the arguments of each module besides x."""
    probe = copy.copy(block)
    parts = {name: StandIn(phase) for phase, name in enumerate(block._modules)}
    probe._modules = dict(parts)
    y = forward(probe.train(training), x.clone(), *others)
    return y, [part.others for part in parts.values()]


def _agree(found: tuple[Any, Any], expected: tuple[Any, Any]) -> bool:
    (y, others), (z, theirs) = found, expected
    same = isinstance(y, Tensor) and (y.shape, y.dtype) == (z.shape, z.dtype)
    return same and others == theirs and torch.allclose(y, z)
