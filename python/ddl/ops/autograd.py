"""Derivatives of the operators: for each a function that saves and one that computes gradients.

Backwards are operators too, so that compile, checkpointing and export see one node each. How a call
reaches them is in calls.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor

from ddl.results import ReadParameters

from . import declarations, private
from .calls import call
from .declarations import Operator

Gradients = tuple[Tensor | None, ...]
Grad = Tensor | None


def save_rewrite(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    state, direction, value, gate, ctx.eps_k, ctx.erase = inputs
    _, stats = output
    ctx.save_for_backward(state, direction, value, gate, stats)
    ctx.mark_non_differentiable(stats)
    ctx.set_materialize_grads(False)


def rewrite_gradients(ctx: Any, grad_new_state: Grad, _: None) -> Gradients:
    if grad_new_state is None:
        return (None,) * len(declarations.rewrite.names)
    state, direction, value, gate, stats = ctx.saved_tensors
    found = call(
        declarations.rewrite_backward,
        *(grad_new_state, state, direction, value, gate, ctx.eps_k, ctx.erase, stats),
    )
    wanted = _bits(ctx.needs_input_grad[:4])
    return (*_those(wanted, found), None, None)


def save_read(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    state, *fields, document_starts = inputs
    tensors, ctx.numbers = _split(fields)
    _, value, gate, compressed, rstd = output
    ctx.save_for_backward(state, document_starts, value, gate, compressed, rstd, *tensors)
    ctx.mark_non_differentiable(compressed, rstd)
    ctx.set_materialize_grads(False)


def read_gradients(
    ctx: Any, grad_context: Grad, grad_new_value: Grad, grad_new_gate: Grad, *_: None
) -> Gradients:
    if grad_context is None and grad_new_value is None and grad_new_gate is None:
        return (None,) * len(declarations.read.names)
    state, document_starts, value, gate, compressed, rstd, *tensors = ctx.saved_tensors
    needs = ctx.needs_input_grad
    wanted = _wanted((needs[0], *_tensors_of(needs[1:-1])), grad_new_value, grad_new_gate)
    found = call(
        declarations.read_backward,
        *(grad_context, grad_new_value, grad_new_gate, state, *_joined(tensors, ctx.numbers)),
        *(value, gate, compressed, rstd, document_starts, wanted),
    )
    grad_state, *parameters = _those(wanted, found)
    return (grad_state, *_spread(parameters), None)


def save_rewrite_read(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    state, direction, value, gate, ctx.eps_k, ctx.erase, *fields = inputs
    *fields, anchor, chain, document_starts = fields
    tensors, ctx.numbers = _split(fields)
    _, stats, _, new_value, new_gate, compressed, rstd = output
    ctx.save_for_backward(
        # From the anchor the backward computes the state again, by the rewrites of the chain.
        *(state if anchor is None else anchor, direction, value, gate, document_starts),
        *(stats, new_value, new_gate, compressed, rstd, *tensors),
        *(() if anchor is None or chain is None else chain),
    )
    ctx.mark_non_differentiable(stats, compressed, rstd)
    ctx.set_materialize_grads(False)


def rewrite_read_gradients(
    ctx: Any,
    grad_new_state: Grad,
    _: None,
    grad_context: Grad,
    grad_new_value: Grad,
    grad_new_gate: Grad,
    *__: None,
) -> Gradients:
    incoming = (grad_new_state, grad_context, grad_new_value, grad_new_gate)
    if all(grad is None for grad in incoming):
        return (None,) * len(declarations.rewrite_read.names)
    state, direction, value, gate, document_starts, *rest = ctx.saved_tensors
    stats, new_value, new_gate, compressed, rstd, *rest = rest
    tensors, chain = rest[:_TENSORS], rest[_TENSORS:]
    needs = ctx.needs_input_grad
    wanted = _wanted((*needs[_WRITE], *_tensors_of(needs[_READ])), grad_new_value, grad_new_gate)
    others = (
        *(grad_context, grad_new_value, grad_new_gate),
        *(state, direction, value, gate, ctx.eps_k, ctx.erase),
        *_joined(tensors, ctx.numbers),
        *(stats, new_value, new_gate, compressed, rstd, chain, document_starts, wanted),
    )
    if grad_new_state is not None and _may_overwrite(grad_new_state):
        # torch.compile traces this, and drops the copy if nothing else needs the gradient.
        grad_state = grad_new_state.clone(memory_format=torch.contiguous_format)
        found = (grad_state, *call(declarations.overwriting_backward, grad_state, *others))
    else:
        found = call(declarations.rewrite_read_backward, grad_new_state, *others)
    gradients = _those(wanted, found)
    return (*gradients[:4], None, None, *_spread(gradients[4:]), *[None] * 3)


def save_expand(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, weight, _, document_starts = inputs
    ctx.save_for_backward(x, weight, document_starts)
    ctx.set_materialize_grads(False)


def expand_gradients(ctx: Any, grad_state: Grad) -> Gradients:
    if grad_state is None:
        return (None,) * len(declarations.expand.names)
    x, weight, document_starts = ctx.saved_tensors
    wanted = _bits(ctx.needs_input_grad[:2])
    arguments = (grad_state, x, weight, document_starts, wanted)
    return (*_those(wanted, call(declarations.expand_backward, *arguments)), None, None)


def save_delta_rule(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    *tensors, ctx.scale, initial_state, document_starts, saves = inputs
    if not saves:
        raise ValueError("`saves` must be True in a call that records gradients, got False")
    _, _, errors, states = output
    ctx.save_for_backward(*tensors, initial_state, document_starts, errors, states)
    ctx.mark_non_differentiable(errors, states)
    ctx.set_materialize_grads(False)


def delta_rule_gradients(ctx: Any, grad_y: Grad, grad_final_state: Grad, *_: None) -> Gradients:
    if grad_y is None and grad_final_state is None:
        return (None,) * len(declarations.delta_rule.names)
    q, k, v, beta, g, initial_state, document_starts, errors, states = ctx.saved_tensors
    found = call(
        declarations.delta_rule_backward,
        *(grad_y, grad_final_state, q, k, v, beta, g, ctx.scale, initial_state, document_starts),
        *(errors, states),
    )
    needs = ctx.needs_input_grad
    *gradients, grad_initial_state = _those(_bits((*needs[:5], needs[6])), found)
    return (*gradients, None, grad_initial_state, None, None)


# --- a read's parameters: six tensors and four other values ---------------------------------------

_TENSORS = 6

# Where the arguments of `rewrite_read` have the state with k, v and β, and the read's parameters.
_WRITE, _READ = slice(0, 4), slice(6, -3)


def _tensors_of(fields: Sequence[Any]) -> tuple[Any, ...]:
    """The tensors among a read's parameters, in the order of their gradients."""
    compress, norm_weight, _, gate_weight, gate_bias, value_weight, value_bias, *_ = fields
    return compress, norm_weight, gate_weight, gate_bias, value_weight, value_bias


def _split(fields: Sequence[Any]) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """A read's tensors, and what the backward needs besides."""
    read = ReadParameters(*fields)
    return _tensors_of(fields), (read.norm_eps, read.value_scale, read.value_from_compressed)


def _joined(tensors: Sequence[Any], numbers: Sequence[Any]) -> tuple[Any, ...]:
    """A backward's arguments from both."""
    compress, norm_weight, gate_weight, gate_bias, value_weight, value_bias = tensors
    norm_eps, value_scale, from_compressed = numbers
    weights = (gate_weight, gate_bias, value_weight, value_bias)
    return (compress, norm_weight, norm_eps, *weights, value_scale, from_compressed)


def _spread(gradients: Sequence[Grad]) -> Gradients:
    """Gradients of a read's tensors, at the places of its ten parameters."""
    compress, norm_weight, *others = gradients
    return (compress, norm_weight, None, *others, None, None, None)


# --- which gradients are wanted -------------------------------------------------------------------


def _bits(needs: Sequence[bool]) -> int:
    return sum(1 << bit for bit, need in enumerate(needs) if need)


def _wanted(needs: tuple[bool, ...], grad_value: Grad, grad_gate: Grad) -> int:
    """A bit for every gradient that is needed and that an incoming one reaches.

    needs: those of the read's six tensors come last. Without a gradient of the value its weight and
    bias get None instead of zero, so that no optimizer decays them; likewise those of the gate.
    """
    key = (needs, grad_value is None, grad_gate is None)
    wanted = None if torch.compiler.is_compiling() else _KNOWN.get(key)
    if wanted is None:
        gate, value = 0b11 << len(needs) - 4, 0b11 << len(needs) - 2
        wanted = _bits(needs)
        wanted &= ~((value if grad_value is None else 0) | (gate if grad_gate is None else 0))
        if not torch.compiler.is_compiling():
            _KNOWN[key] = wanted
    return wanted


_KNOWN: dict[tuple[tuple[bool, ...], bool, bool], int] = {}


def _those(wanted: int, gradients: Sequence[Tensor]) -> Gradients:
    """The gradients with their bit set; None for the others."""
    return tuple([grad if wanted >> bit & 1 else None for bit, grad in enumerate(gradients)])


def _may_overwrite(grad: Tensor) -> bool:
    return private.is_traced_for_compile(grad) and grad.device.type == "cpu"


# --- what has no derivative -----------------------------------------------------------------------


def save_nothing(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    """The save of a backward, whose own derivative is refused."""


def refuse_recording(ctx: Any, inputs: tuple[Any, ...], output: Any) -> NoReturn:
    """Raise ValueError in place of a save."""
    raise ValueError(
        "a step with a cache must be called under torch.no_grad() or torch.inference_mode(), got a "
        "call that records gradients"
    )


def refuse_derivative(kind: str, operator: Operator) -> NoReturn:
    name = operator.name.removesuffix("_").removesuffix("_backward")
    raise NotImplementedError(
        f"{kind} of `ddl.{name}` must go through `ddl.reference.{name}`, "
        "got the fused operator, which has first reverse-mode derivatives only"
    )
