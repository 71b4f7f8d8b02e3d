"""Gradients of frozen parameters are neither computed nor returned; the others keep their bits."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch

from ddl import functional
from ddl.ops import declarations
from tests.ops.test_ops_torch import backward_arguments, operator_arguments
from tests.support.helpers import present
from tests.support.op_cases import BF16, F32, F64, inputs, parameters

PARAMETERS = declarations.read.inputs[1:]


def gradients(
    given: dict[str, torch.Tensor | None], frozen: set[str], **options: Any
) -> dict[str, torch.Tensor | None]:
    """Gradients of a rewrite_read by name; None for frozen parameters."""
    leaves = {
        name: None if tensor is None else tensor.clone().requires_grad_(name not in frozen)
        for name, tensor in given.items()
    }
    outputs = functional.rewrite_read(**leaves, eps_k=0.1, **options)
    sum(output.float().square().sum() for output in present(outputs)).backward()
    return {name: None if leaf is None else leaf.grad for name, leaf in leaves.items()}


@pytest.mark.table
@pytest.mark.parametrize("dtype", [F64, F32, BF16], ids=str)
@pytest.mark.parametrize(("m", "compress"), [(1, "identity"), (3, "channel"), (2, "token")])
@pytest.mark.parametrize("frozen", list(product([False, True], repeat=4)), ids=str)
@pytest.mark.parametrize("value_from", ["context", "compressed"])
def test_the_other_gradients_keep_their_bits(dtype, m, compress, frozen, value_from):
    given = inputs((2, 5), 8, m) | parameters(8, m, compress, taps=3)
    stored = {name: tensor.to(dtype) for name, tensor in given.items() if tensor is not None}
    real = torch.promote_types(dtype, F32)
    stored |= {name: given[name].to(real) for name in ("value", "gate")}
    groups = (("compress",), ("norm_weight",), ("gate_weight", "gate_bias"),
              ("value_weight", "value_bias"))  # fmt: skip
    names = {name for group, cold in zip(groups, frozen, strict=True) if cold for name in group}
    wanted = gradients(stored, set(), value_from=value_from)
    for name, grad in gradients(stored, names, value_from=value_from).items():
        if name in names:
            assert grad is None, name
        else:
            assert torch.equal(grad, wanted[name]), name


@pytest.mark.parametrize("name", ["read", "rewrite_read"])
def test_native_code_returns_nothing_for_them(name):
    arguments = [
        x.detach() if isinstance(x, torch.Tensor) else x
        for x in operator_arguments(name, 2, "token", F32)
    ]
    backward = getattr(declarations, name).backward
    for parameter in PARAMETERS:
        bit = backward.outputs.index(f"grad_{parameter}")
        with torch.no_grad():
            outputs = getattr(torch.ops.ddl, backward.name)(
                *backward_arguments(name, arguments, wanted=~(1 << bit))
            )
        absent = [n for n, x in zip(backward.outputs, outputs, strict=True) if x is None]
        assert absent == [f"grad_{parameter}"]


def test_a_frozen_weight_of_an_expansion():
    x, weight = torch.randn(2, 5, 6), torch.randn(6, 3, 2)
    leaf = x.clone().requires_grad_()
    functional.expand(leaf, weight, value_channels=3).square().sum().backward()
    other, learnt = x.clone().requires_grad_(), weight.clone().requires_grad_()
    functional.expand(other, learnt, value_channels=3).square().sum().backward()
    assert torch.equal(leaf.grad, other.grad)
    assert learnt.grad is not None
