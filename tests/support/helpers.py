"""Random parameters and named gradients for the tests of modules."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from tests.support.tolerances import assert_close


def randomise_(module: nn.Module, seed: int = 0, std: float = 0.5) -> None:
    """Randomise every parameter: a zero or one of the initialisation would hide a term."""
    g = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            noise = torch.randn(parameter.shape, generator=g, dtype=torch.float64, device=g.device)
            fan_in = parameter.shape[-1] if parameter.ndim > 1 else 1
            parameter.copy_(std * noise / fan_in**0.5)


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    """Standard normal values, the same in every dtype up to rounding."""
    g = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(*shape, generator=g, dtype=torch.float64, device=g.device).to(dtype)


def present(result: Iterable[Tensor | None]) -> list[Tensor]:
    """The tensors of an operator's result, which has None for what was not asked for."""
    return [tensor for tensor in result if tensor is not None]


def by_name(result: Any) -> dict[str, Tensor]:
    """The same by the names of its fields."""
    return {name: tensor for name, tensor in result._asdict().items() if tensor is not None}


def documents(starts: Tensor) -> Iterator[tuple[int, slice]]:
    """The sequence and the tokens of every document."""
    for sequence, row in enumerate(starts):
        begins = [0, *[t for t in row.nonzero().flatten().tolist() if t > 0], starts.shape[1]]
        for first, last in itertools.pairwise(begins):
            yield sequence, slice(first, last)


def gradients(outputs: Tensor, inputs: dict[str, Tensor], module: nn.Module) -> dict[str, Tensor]:
    """Gradients by name of inputs and parameters, for a fixed random gradient of `outputs`."""
    leaves = {**inputs, **dict(module.named_parameters())}
    cotangent = normal(*outputs.shape, seed=99, dtype=outputs.dtype)
    grads = torch.autograd.grad(outputs, list(leaves.values()), cotangent, allow_unused=True)
    return {
        name: torch.zeros_like(leaf) if grad is None else grad
        for (name, leaf), grad in zip(leaves.items(), grads, strict=True)
    }


def assert_same_gradients(
    actual: dict[str, Tensor],
    expected: dict[str, Tensor],
    dtype: torch.dtype,
    *,
    may_vanish: tuple[str, ...] = (),
    depth: int = 1,
) -> None:
    """Compare name by name; an all-zero gradient also fails, unless its name is in `may_vanish`.

    A bias gradient is one sum over tokens and may cancel to nearly zero. Its error is therefore
    relative to the scale of its weight, whose gradient sums the same terms times factors near one.
    """
    assert actual.keys() == expected.keys()
    for name, gradient in expected.items():
        beside = expected.get(name.removesuffix("bias") + "weight", gradient)
        scale = max(gradient.square().mean(), beside.square().mean()).sqrt().item()
        options = {"gradient": True, "scale": scale, "depth": depth}
        assert_close(f"gradient of {name}", actual[name], gradient, dtype, **options)
        assert gradient.any() or name.endswith(may_vanish), f"gradient of {name} is zero"


class Wrapper(nn.Module):
    """A wrapper like an adapter's: it has the wrapped module's parameters, but another forward."""

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.base = base

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("base"), name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.base(*args, **kwargs)
