"""One declaration per operator: torch's schema and the reference agree with it."""

from __future__ import annotations

import inspect
import re

import pytest
import torch

from ddl import _native, functional, options, reference
from ddl.ops.declarations import FORWARDS, OPERATORS, Forward, Operator
from tests.support import ROOT


@pytest.mark.parametrize("operator", OPERATORS, ids=lambda operator: operator.name)
def test_torch_has_the_schema(operator: Operator):
    schema = getattr(torch.ops.ddl, operator.name).default._schema
    assert [argument.name for argument in schema.arguments] == operator.names
    assert len(schema.returns) == len(operator.outputs)


@pytest.mark.parametrize("forward", FORWARDS, ids=lambda operator: operator.name)
def test_a_backward_gets_what_its_forward_has(forward: Forward):
    backward = forward.backward
    assert not set(backward.names) & set(backward.outputs)
    incoming = {f"grad_{result}" for result in forward.results}
    assert backward.outputs == [f"grad_{name}" for name in forward.inputs]
    assert set(backward.names) == {
        *incoming, *forward.inputs, *forward.passed, *forward.saved, "wanted"
    }  # fmt: skip


@pytest.mark.parametrize("name", ["rewrite", "read", "rewrite_read", "expand"])
def test_the_functional_form_has_the_signature_of_the_reference(name: str):
    fused, plain = (inspect.signature(getattr(module, name)) for module in (functional, reference))
    assert list(fused.parameters) == list(plain.parameters)


@pytest.mark.parametrize("name", ["LEAST_EPS_K", "LEAST_NORM_EPS", "MOST_LINKS", "MOST_REWRITES"])
def test_limits_are_those_of_native_code(name: str):
    assert getattr(options, name) == getattr(_native, name)


def test_native_code_takes_every_argument_by_its_name():
    """An optional argument that it spells otherwise would be None in silence."""
    taken = r'\.(?:optional|number|tensor)(?:::<[\w<>]+>)?\(\s*"(\w+)"'
    names = set(re.findall(taken, (ROOT / "src/torch/operators.rs").read_text()))
    records = (ROOT / "src/records.rs").read_text()
    for record in ("Write<T, S -> R>", "Read<T>", "Incoming<T, S -> R>"):
        fields = records.partition(f"    {record} {{")[2].partition("\n    }")[0]
        names |= set(re.findall(r"pub (\w+):", fields))
    assert names == {name for operator in OPERATORS for name in operator.names}
