"""Invalid arguments of the operators, each with the message of the error that it raises."""

from __future__ import annotations

import inspect
import re
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from ddl import functional

B, T, D, M, K = 2, 5, 4, 3, 2
READ = ("compress", "norm_weight", "gate_weight", "gate_bias", "value_weight", "value_bias")
SHAPES = {
    "state": (B, T, D, M),
    "direction": (B, T, D),
    "value": (B, T, M),
    "gate": (B, T),
    "compress": (D, M),
    "norm_weight": (D,),
    "gate_weight": (D,),
    "gate_bias": (),
    "value_weight": (M, D),
    "value_bias": (M,),
    "x": (B, T, D),
    "weight": (D, M, K),
    "q": (B, T, 1, D),
    "k": (B, T, 2, D),
    "v": (B, T, 2, M),
    "beta": (B, T, 2),
    "g": (B, T, 2),
    "initial_state": (B, 2, D, M),
}
NUMBERS = {"eps_k": 0.1, "value_channels": M}
FUNCTIONS = {
    name: getattr(functional, name) for name in functional.__all__ if hasattr(torch.ops.ddl, name)
}

ANY = "float32, float64, bfloat16 or float16"
SINGLE = "torch.float32 or torch.bfloat16 or torch.float16"
STATE = "`state` must have shape (…, hidden_size, value_channels), got "


class Case(NamedTuple):
    """A change that makes valid arguments invalid, and the error that it raises."""

    name: str
    change: dict[str, Any]
    error: type[Exception]
    sentence: str

    def __str__(self) -> str:
        return f"{self.name} {self.sentence.split('`')[1]}"


def zeros(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.zeros(shape, dtype=dtype)


def wrong_value(
    name: str, argument: str, got: Any, expected: str, error: type[Exception] = ValueError
) -> Case:
    return Case(name, {argument: got}, error, f"`{argument}` must be {expected}, got {got!r}")


def wrong_shape(name: str, argument: str, *got: int, expected: str | None = None) -> Case:
    expected = expected or str(SHAPES[argument])
    sentence = f"`{argument}` must have shape {expected}, got {got}"
    return Case(name, {argument: zeros(*got)}, ValueError, sentence)


def wrong_dtype(name: str, argument: str, dtype: torch.dtype, expected: str = ANY) -> Case:
    sentence = f"`{argument}` must have dtype {expected}, got {dtype}"
    return Case(name, {argument: zeros(*SHAPES[argument], dtype=dtype)}, TypeError, sentence)


def arguments(name: str, change: dict[str, Any]) -> dict[str, Any]:
    """Valid arguments of a functional form, updated by `change`."""
    known = inspect.signature(FUNCTIONS[name]).parameters
    tensors = {n: zeros(*shape) for n, shape in SHAPES.items() if n in known}
    return tensors | {n: x for n, x in NUMBERS.items() if n in known} | change


def call_function(name: str, given: dict[str, Any]) -> Any:
    return FUNCTIONS[name](**given)


def call_operator(name: str, given: dict[str, Any]) -> Any:
    """Call torch.ops.ddl directly, without the checks of `ddl.functional`."""
    defaults = {
        "norm_eps": 1e-5,
        "value_from_compressed": False,
        "erase": 0,
        "saves": False,
    }
    operator = getattr(torch.ops.ddl, name)
    schema = operator.default._schema.arguments
    return operator(*((defaults | given).get(argument.name) for argument in schema))


def elsewhere(where: str, given: dict[str, Any]) -> dict[str, Any]:
    """Convert the arguments to CPU tensors, meta tensors or fake tensors."""
    if where == "cpu":
        return given
    mode = FakeTensorMode()
    move = (lambda t: t.to("meta")) if where == "meta" else mode.from_tensor
    return {n: move(x) if isinstance(x, Tensor) else x for n, x in given.items()}


def refused(error: type[Exception], sentence: str) -> Any:
    return pytest.raises(error, match=f"^{re.escape(sentence)}$")
