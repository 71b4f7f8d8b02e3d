"""Compiled graphs overwrite the gradient of X' with that of X if nothing else needs it."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch._inductor.utils import run_and_get_code

from ddl import functional
from ddl.lab.config import PRESETS
from ddl.models import GPT
from ddl.ops import declarations
from tests.ops.test_ops_torch import CASES, F64, backward_arguments, operator_arguments

CHANNELS = [*CASES, (4, "channel")]


def overwriting_arguments(m: int, compress: str, dtype: torch.dtype) -> list[Any]:
    """Positional arguments of torch.ops.ddl.rewrite_read_backward, and of the one in place."""
    wide = torch.promote_types(dtype, torch.float32)
    arguments = [
        x.detach() if isinstance(x, torch.Tensor) else x
        for x in operator_arguments("rewrite_read", m, compress, wide)
    ]
    arguments[0] = arguments[0].to(dtype)
    return backward_arguments("rewrite_read", arguments)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize(("m", "compress"), CHANNELS)
@torch.no_grad()
def test_in_place_is_the_same_backward(m, compress, dtype):
    grad_state, *rest = overwriting_arguments(m, compress, dtype)
    expected, *others = torch.ops.ddl.rewrite_read_backward(grad_state, *rest)
    strided = grad_state.clone().transpose(0, 1).contiguous().transpose(0, 1)
    for overwritten in (grad_state.clone(), strided):
        outputs = torch.ops.ddl.rewrite_read_backward_(overwritten, *rest)
        for actual, wanted in zip((overwritten, *outputs), (expected, *others), strict=True):
            assert actual is wanted is None or torch.equal(actual, wanted)


@torch.no_grad()
def test_what_is_read_cannot_be_overwritten():
    _, *rest = overwriting_arguments(1, "identity", torch.float32)
    _, *names = declarations.overwriting_backward.names
    for name in ("grad_context", "state", "direction"):
        arguments, at = list(rest), names.index(name)
        memory = torch.randn(2 * 5 * 6)
        arguments[at] = memory.view(arguments[at].shape)
        with pytest.raises(RuntimeError, match=f"`grad_new_state` must not overlap `{name}`"):
            torch.ops.ddl.rewrite_read_backward_(memory.view(2, 5, 6, 1), *arguments)


@pytest.mark.parametrize(("m", "compress"), CASES)
@torch.no_grad()
def test_opcheck_in_place(m, compress):
    operator = torch.ops.ddl.rewrite_read_backward_.default
    torch.library.opcheck(operator, overwriting_arguments(m, compress, F64))


def operands_of(run: Callable[[], Any]) -> tuple[Any, list[str]]:
    """Return the result of a compiled run, and the operand that each backward overwrites."""
    with torch._inductor.config.patch(force_disable_caches=True):
        result, code = run_and_get_code(run)
    torch._dynamo.reset()
    call = r"rewrite_read_backward_\.default\((?:reinterpret_tensor\()?(\w+),"
    return result, re.findall(call, "\n".join(code))


def compiled(function, *inputs: torch.Tensor) -> tuple[tuple[torch.Tensor, ...], list[str]]:
    """Return gradients of the compiled function, and the operands that its backwards overwrite."""

    def run() -> tuple[torch.Tensor, ...]:
        return torch.autograd.grad(torch.compile(function, fullgraph=True)(*inputs), inputs)

    return operands_of(run)


def rewrite_read(state: torch.Tensor, seed: int) -> torch.Tensor:
    """X' of a rewrite_read whose direction comes from the state, so that calls depend on it."""
    read = {"gate_weight": torch.full((6,), 0.1 * seed, dtype=state.dtype), "norm_eps": 1e-5}
    direction = torch.tanh(state[..., 0] * seed)
    value, gate = state.mean(-2), state.sum((-2, -1)).sigmoid()
    new_state, context, _, new_gate = functional.rewrite_read(
        state,
        direction,
        value,
        gate,
        eps_k=0.1,
        compress=torch.ones(6, 2, dtype=state.dtype),
        **read,
    )
    return new_state + (context * new_gate[..., None])[..., None]


def test_every_rewrite_read_of_a_trunk_overwrites():
    def trunk(state: torch.Tensor) -> torch.Tensor:
        return rewrite_read(rewrite_read(rewrite_read(state, 1), 2), 3).square().sum()

    state = torch.randn(2, 5, 6, 2, dtype=F64, requires_grad=True)
    (actual,), operands = compiled(trunk, state)
    (expected,) = torch.autograd.grad(trunk(state), (state,))
    torch.testing.assert_close(actual, expected)
    assert len(operands) == 3


@pytest.mark.exhaustive
def test_a_gradient_that_others_need_is_copied_first():
    def branches(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        # Both terms of a sum get the same gradient tensor, and here a third use needs it as well.
        total = rewrite_read(a, 1) + rewrite_read(b, 2)
        return (total * torch.linspace(0.0, 1.0, 6)[:, None]).square().sum() + a.square().sum()

    inputs = [torch.randn(2, 5, 6, 2, dtype=F64, requires_grad=True) for _ in range(2)]
    actual, operands = compiled(branches, *inputs)
    expected = torch.autograd.grad(branches(*inputs), inputs)
    for name, *pair in zip("ab", actual, expected, strict=True):
        torch.testing.assert_close(*pair, msg=lambda text, name=name: f"{name}: {text}")
    assert len(set(operands)) == 2


@pytest.mark.exhaustive
def test_a_model_copies_no_gradient_of_its_state():
    model = GPT(replace(PRESETS["tiny"].model, residual="ddl-cc"))
    tokens = torch.randint(256, (2, 16))

    def run() -> None:
        torch.compile(model, fullgraph=True)(tokens, labels=tokens).loss.backward()

    _, operands = operands_of(run)
    assert len(operands) == 3, "all backwards but that of the last, whose state is not read"
    assert len(set(operands)) == 1, "they share one buffer"


def test_a_gradient_from_outside_is_not_overwritten():
    state = torch.randn(2, 5, 6, 2, dtype=F64, requires_grad=True)
    grad = torch.randn(2, 5, 6, 2, dtype=F64)
    kept = grad.clone()
    step = torch.compile(lambda state: rewrite_read(state, 1), fullgraph=True)
    with torch._inductor.config.patch(force_disable_caches=True):
        output = step(state)
        first = torch.autograd.grad(output, state, grad, retain_graph=True)
        second = torch.autograd.grad(output, state, grad)
    torch._dynamo.reset()
    assert torch.equal(grad, kept)
    expected = torch.autograd.grad(rewrite_read(state, 1), state, grad)
    torch.testing.assert_close((first, second), (expected, expected))
