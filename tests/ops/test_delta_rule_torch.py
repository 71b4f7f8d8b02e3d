"""`delta_rule` under opcheck, gradcheck, torch.compile, autocast, checkpointing and export."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from ddl import functional
from ddl.ops import declarations
from tests.support.delta_rule_cases import GATES, problem, results, rounded
from tests.support.op_cases import BF16, F32

OP, BACKWARD = torch.ops.ddl.delta_rule.default, torch.ops.ddl.delta_rule_backward.default
KINDS = [("alike", "head"), ("grouped", "feature"), ("steps, queries", None)]
SIZES = {"B": 1, "T": 3, "K": 2, "V": 2}


def positional(layout: str, g: str | None, *, saves: bool = True, **options: Any) -> list[Any]:
    """The operator's arguments, which require gradients if it `saves`."""
    given = problem(layout, g=g, **SIZES | options) | {"scale": None, "saves": saves}
    values = [given[name] for name in declarations.delta_rule.names]
    floating = [isinstance(x, Tensor) and x.is_floating_point() for x in values]
    return [x.requires_grad_(saves) if f else x for x, f in zip(values, floating, strict=True)]


@pytest.mark.parametrize(("layout", "g"), KINDS)
@pytest.mark.parametrize("saves", [True, False])
def test_opcheck(layout, g, saves):
    torch.library.opcheck(OP, positional(layout, g, saves=saves, documents=True))


@pytest.mark.parametrize(("layout", "g"), KINDS)
@pytest.mark.parametrize("state", [True, False])
def test_opcheck_of_the_backward(layout, g, state):
    arguments = positional(layout, g, state=state)
    arguments = [x.detach() if isinstance(x, Tensor) else x for x in arguments]
    y, final_state, errors, states = OP(*arguments)
    grads = [torch.randn_like(y), torch.randn_like(final_state)]
    given = [*grads, *arguments[:-1], errors, states, -1]
    with torch.no_grad():
        torch.library.opcheck(BACKWARD, given)
        torch.library.opcheck(BACKWARD, [None, *given[1:]])


@pytest.mark.parametrize(("layout", "g"), KINDS)
def test_gradcheck(layout, g):
    arguments = positional(layout, g, documents=True)
    assert torch.autograd.gradcheck(lambda *values: OP(*values)[:2], arguments)


@pytest.mark.parametrize(("layout", "g"), KINDS)
def test_compiled_equals_eager(layout, g):
    def call(**given: Any) -> Any:
        return functional.delta_rule(**given)

    compiled = torch.compile(call, fullgraph=True)
    for T in (5, 70):
        given = rounded(problem(layout, T=T, g=g, documents=True), F32)
        actual, expected = results(compiled, given), results(functional.delta_rule, given)
        for name in expected:
            assert torch.equal(actual[name], expected[name]), name
        with torch.no_grad():
            assert torch.equal(compiled(**given).y, expected["y"])
    torch._dynamo.reset()


def test_checkpointing():
    given = rounded(problem("grouped", T=70), F32)
    actual = results(
        lambda **given: checkpoint(functional.delta_rule, **given, use_reentrant=False), given
    )
    for name, expected in results(functional.delta_rule, given).items():
        assert torch.equal(actual[name], expected), name


class Mixer(torch.nn.Module):
    def forward(self, q: Tensor, k: Tensor, v: Tensor, beta: Tensor, g: Tensor) -> Tensor:
        return functional.delta_rule(q, k, v, beta, g).y


def test_export_with_dynamic_batch_and_time():
    names = ("q", "k", "v", "beta", "g")
    sizes = {
        0: torch.export.Dim("batch", min=2, max=64),
        1: torch.export.Dim("time", min=2, max=512),
    }

    def inputs(B: int, T: int) -> tuple[Tensor, ...]:
        given = rounded(problem("grouped", B=B, T=T), F32)
        return tuple(given[name] for name in names)

    program = torch.export.export(Mixer(), inputs(2, 5), dynamic_shapes=[sizes] * 5)
    for B, T in ((2, 5), (3, 70)):
        assert torch.equal(program.module()(*inputs(B, T)), Mixer()(*inputs(B, T)))


def test_autocast_changes_nothing():
    given = rounded(problem("alike", T=9), F32)
    expected = results(functional.delta_rule, given)
    with torch.autocast(given["q"].device.type, dtype=BF16):
        actual = results(functional.delta_rule, given)
    for name in expected:
        assert torch.equal(actual[name], expected[name]), name


def test_nothing_is_saved_without_a_backward():
    given = problem("alike")
    found = OP(*positional("alike", "head", saves=False))
    assert found[2:] == (None, None)
    with torch.no_grad():
        functional.delta_rule(
            **{n: x.requires_grad_() if n in GATES else x for n, x in given.items()}
        )
    with pytest.raises(ValueError, match=r"^a step with a cache must be called under torch.no_gr"):
        OP(*positional("alike", "head")[:-1], False)


def test_double_backward_refuses():
    arguments = positional("alike", "head")
    y, *_ = OP(*arguments)
    (grad,) = torch.autograd.grad(y.square().sum(), arguments[0], create_graph=True)
    message = "double backward of `ddl.delta_rule` must go through"
    with pytest.raises(NotImplementedError, match=message):
        grad.sum().backward()


def test_transforms_refuse():
    given = problem("alike")
    with pytest.raises(NotImplementedError, match=r"outside of torch\.func transforms"):
        torch.func.vjp(lambda q: functional.delta_rule(**given | {"q": q}).y, given["q"])
