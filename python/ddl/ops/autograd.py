"""The derivative of an operator, from its declaration.

Backwards are operators too, so that compile, checkpointing and export see one node each.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn, TypeGuard

import torch
from torch import Tensor

from . import declarations, private
from .declarations import Forward
from .refusals import raise_refusal

Call = Callable[..., Any]
Gradients = tuple[Tensor | None, ...]

# The only result that depends on a parameter. Without a gradient of that result the parameter gets
# None instead of zeros, so that no optimizer decays it.
REACHED_BY = {
    "gate_weight": "new_gate",
    "gate_bias": "new_gate",
    "value_weight": "new_value",
    "value_bias": "new_value",
}


def derivative(operator: Forward, kernel: Call, backward_kernel: Call) -> Call:
    """Return the `apply` of a torch.autograd.Function around an operator's kernel, which takes the
    schema's arguments by position, and its backward's."""
    inputs, others = len(operator.inputs), len(operator.names) - len(operator.inputs)
    starts, chains = "document_starts" in operator.passed, "chain" in operator.passed
    numbers = slice(inputs + starts + chains, inputs + len(operator.passed))
    saved = [operator.outputs.index(name) for name in operator.saved]
    results = len(operator.results)
    saves = operator.names.index("saves")
    anchor = operator.names.index("anchor") if chains else None
    wanted = _wanted(operator)

    class Derivative(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *values: Any) -> Any:
            outputs = kernel(*values)
            if not any(ctx.needs_input_grad):
                return outputs
            if not values[saves]:
                raise ValueError(
                    "a step with a cache must be called under torch.no_grad() or "
                    "torch.inference_mode(), got a call that records gradients"
                )
            first, links = values[0], ()
            if anchor is not None and values[anchor] is not None:
                # From the anchor the backward computes the state again, by the chain's rewrites.
                first, links = values[anchor], values[inputs + starts] or ()
            kept = [outputs[at] for at in saved]
            ctx.save_for_backward(
                first, *values[1:inputs], *kept, *values[inputs : inputs + starts], *links
            )
            ctx.numbers = values[numbers]
            ctx.mark_non_differentiable(*[x for x in outputs[results:] if x is not None])
            ctx.set_materialize_grads(False)
            return outputs

        @staticmethod
        def backward(ctx: Any, *grads: Tensor | None) -> Gradients:
            grads = grads[:results]
            if all(grad is None for grad in grads):
                return (None,) * (inputs + others)
            if not torch.is_grad_enabled():
                return (*gradients(ctx, grads), *[None] * others)
            with torch.no_grad():
                result = gradients(ctx, grads)
            return (*_without_derivative(operator, result), *[None] * others)

    def gradients(ctx: Any, grads: Gradients) -> Gradients:
        tensors = ctx.saved_tensors
        kept, rest = tensors[inputs : inputs + len(saved)], tensors[inputs + len(saved) :]
        arguments = (
            *(*grads[1:], *tensors[:inputs], *rest[:starts]),
            *([rest[starts:]] if chains else []),
            *(*ctx.numbers, *kept, wanted(ctx.needs_input_grad[:inputs], grads)),
        )
        first = grads[0]
        if operator is declarations.rewrite_read and _is_traced(first):
            # torch.compile drops the copy if nothing else needs the gradient.
            first = first.clone(memory_format=torch.contiguous_format)
            return (first, *declarations.overwriting_backward.call(first, *arguments))
        try:
            result: Gradients = backward_kernel(first, *arguments)
        except (RuntimeError, TypeError) as error:
            raise_refusal(operator.backward, (first, *arguments), error)
        return result

    apply: Call = Derivative.apply
    return apply


def _is_traced(grad: Tensor | None) -> TypeGuard[Tensor]:
    """Whether a gradient on a CPU is one of a graph that torch.compile traces."""
    return grad is not None and private.is_traced_for_compile(grad) and grad.device.type == "cpu"


def _wanted(operator: Forward) -> Callable[[tuple[bool, ...], Gradients], int]:
    """Return the function that computes `wanted`: a bit for every gradient that is needed and that
    an incoming one reaches."""
    reached_by = [
        operator.results.index(REACHED_BY[name]) if name in REACHED_BY else None
        for name in operator.inputs
    ]
    known: dict[tuple[bool, ...], int] = {}

    def wanted(needs: tuple[bool, ...], grads: Gradients) -> int:
        compiling = torch.compiler.is_compiling()
        key = (*needs, *[grad is None for grad in grads])
        if not compiling and key in known:
            return known[key]
        bits = 0
        for bit, (need, result) in enumerate(zip(needs, reached_by, strict=True)):
            if need and (result is None or grads[result] is not None):
                bits |= 1 << bit
        if not compiling:
            known[key] = bits
        return bits

    return wanted


class _Last(torch.autograd.Function):
    """The identity, whose derivative is refused."""

    @staticmethod
    def forward(ctx: Any, operator: Forward, *gradients: Tensor | None) -> Any:
        ctx.operator = operator
        return gradients

    @staticmethod
    def backward(ctx: Any, *_: Tensor | None) -> NoReturn:
        name = ctx.operator.name
        raise NotImplementedError(
            f"double backward of `ddl.{name}` must go through `ddl.reference.{name}`, "
            "got the fused operator, which has first reverse-mode derivatives only"
        )


def _without_derivative(operator: Forward, gradients: Gradients) -> Gradients:
    """The gradients of a backward with create_graph=True, which can be used once."""
    result: Gradients = _Last.apply(
        operator, *[None if grad is None else grad.detach().requires_grad_() for grad in gradients]
    )
    return result
