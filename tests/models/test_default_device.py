"""Models are compiled as one graph also where a default device is set.

Such a device is a mode around every call, in which torch.compile cannot trace methods that torch
writes in Python over ones of C++ (`Tensor.unflatten`); the functions beside them it can.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ddl
from ddl import DeltaStream
from ddl.lab.config import RESIDUALS
from ddl.models import GPT
from tests.models.test_architecture import config_of
from tests.support.read_cases import name_of
from tests.support.sampling import few

CPU = torch.device("cpu")
MIXERS: list[dict[str, Any]] = [
    {"mixer": "deltanet"},
    {"mixer": "deltaproduct", "mixer_n": 2, "mixer_gated": "per-feature"},
]
STREAMS: list[dict[str, Any]] = [
    {"rewrites": 2, "gate": "mlp"},
    {"value": "sigmoid", "value_channels": 2, "compress": "channel"},
]


@pytest.fixture(autouse=True)
def _afresh() -> Iterator[None]:
    torch._dynamo.reset()
    with CPU:
        yield


@pytest.mark.parametrize("residual", few(RESIDUALS, "ddl-tc", "mhc"))  # each is compiled
def test_residuals(residual: str) -> None:
    check(residual=residual)


@pytest.mark.parametrize("options", MIXERS, ids=name_of)
def test_mixers(options: dict[str, Any]) -> None:
    check(**options)


def check(**options: Any) -> None:
    model = GPT(config_of(num_layers=1, **options)).requires_grad_(False)
    idx = torch.randint(model.config.vocab_size, (2, 8))
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(idx).logits, model(idx).logits)


@pytest.mark.parametrize("options", STREAMS, ids=name_of)
def test_streams(options: dict[str, Any]) -> None:
    stream = DeltaStream(8, [nn.Linear(8, 8)], **options).requires_grad_(False)
    x = torch.randn(2, 3, 8)
    compiled = torch.compile(stream, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(x), stream(x))


def test_no_such_method_is_called() -> None:
    """None of them anywhere in the package, for the tests above do not have all its options."""
    package = Path(ddl.__file__).parent
    for path in package.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.Attribute) and node.attr == "unflatten":
                where = f"{path.relative_to(package)}, line {node.lineno}"
                assert isinstance(node.value, ast.Name), where
                assert node.value.id == "torch", f"{where}: call torch.unflatten"
