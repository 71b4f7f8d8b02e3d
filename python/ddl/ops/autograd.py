"""The call of an operator, and its derivative, from its declaration.

In compiled code the call is the overload `default`, one node of the graph. In eager code a
derivative is recorded around the overload `kernel`. The Autograd kernel of `default` does the same
around `default` itself, so that a graph that is traced through it has that node. Backwards are
operators too, so that compile, checkpointing and export see one node each.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import compress
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.autograd import forward_ad

from . import declarations, plain, private
from .declarations import Forward
from .devices import has_kernels
from .refusals import raise_refusal, refuse_tangents

Call = Callable[..., Any]
Gradients = tuple[Tensor | None, ...]

# The parameters that reach one result alone. Without a gradient of that result they get None in
# place of zeros, so that no optimizer decays them.
PARAMETERS_OF = {
    "new_gate": ("gate_weight", "gate_bias"),
    "new_value": ("value_weight", "value_bias"),
}


def call_of(operator: Forward, kernel: Call, compiled: Call | None = None) -> Call:
    """Return the call of an operator with positional arguments, of which autograd records the
    derivative. What torch or native code refused is explained.

    compiled: called instead in compiled code. Without it the call can be the operator's
    implementation for the dispatch key Autograd.
    """
    apply = derivative(operator, kernel)
    in_plain_torch = plain.outputs_of(operator)
    is_compiling, is_grad_enabled = torch.compiler.is_compiling, torch.is_grad_enabled
    is_inference, unpack_dual = torch.is_inference_mode_enabled, forward_ad.unpack_dual

    def call(*values: Any) -> Any:
        if compiled is not None and is_compiling():
            return compiled(*values)
        try:
            if is_grad_enabled():
                return apply(*values)
            if not is_inference():
                first = values[0]
                primal, tangent = unpack_dual(first)
                if primal is not first or tangent is not None:  # within a dual level
                    refuse_tangents(operator, values)
            return kernel(*values)
        except (RuntimeError, TypeError) as error:
            if not isinstance(values[0], Tensor) or has_kernels(values[0].device):
                raise_refusal(operator, values, error)
        return in_plain_torch(*values)

    return call


def derivative(operator: Forward, kernel: Call) -> Call:
    """Return the `apply` of a torch.autograd.Function around an operator's kernel, which takes the
    schema's arguments by position."""
    backward_kernel = operator.backward.call
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
            leaves = [None if grad is None else grad.detach().requires_grad_() for grad in result]
            return (*_Last.apply(operator.name, *leaves), *[None] * others)

    def gradients(ctx: Any, grads: Gradients) -> Gradients:
        tensors = ctx.saved_tensors
        kept, rest = tensors[inputs : inputs + len(saved)], tensors[inputs + len(saved) :]
        arguments = (
            *(*grads[1:], *tensors[:inputs], *rest[:starts]),
            *([rest[starts:]] if chains else []),
            *(*ctx.numbers, *kept, wanted(ctx.needs_input_grad[:inputs], grads)),
        )
        first = grads[0]
        if (
            operator is declarations.rewrite_read
            and first is not None
            and first.is_cpu
            and private.is_traced_for_compile(first)
        ):
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


def _wanted(operator: Forward) -> Callable[[tuple[bool, ...], Gradients], int]:
    """Return the function that computes `wanted`: a bit for every gradient that is needed and that
    an incoming one reaches."""
    bits = {name: 1 << bit for bit, name in enumerate(operator.inputs)}
    of_result = [
        sum(bits[parameter] for parameter in PARAMETERS_OF.get(name, ()))
        for name in operator.results
    ]

    def wanted(needs: tuple[bool, ...], grads: Gradients) -> int:
        found = sum(compress(bits.values(), needs))
        for grad, of_one in zip(grads, of_result, strict=True):
            if grad is None:
                found &= ~of_one
        return found

    return wanted


class _Last(torch.autograd.Function):
    """The identity, whose derivative is refused: a backward with create_graph=True is recorded."""

    @staticmethod
    def forward(ctx: Any, name: str, *gradients: Tensor | None) -> Any:
        ctx.name = name
        return gradients

    @staticmethod
    def backward(ctx: Any, *_: Tensor | None) -> NoReturn:
        raise NotImplementedError(
            f"double backward of `ddl.{ctx.name}` must go through `ddl.reference.{ctx.name}`, "
            "got the fused operator, which has first reverse-mode derivatives only"
        )
