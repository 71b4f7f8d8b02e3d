"""The call of an operator.

In compiled code it is the overload `default`, one node of the graph. In eager code a derivative is
recorded around the overload `kernel`, and what torch or native code refused is explained. The
Autograd kernel of `default` does the same around `default` itself, so that a graph that is traced
through it has that node.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.autograd import forward_ad

from . import plain
from .autograd import derivative
from .declarations import Forward
from .devices import has_kernels
from .refusals import raise_refusal, refuse_tangents

Call = Callable[..., Any]


def call_of(
    operator: Forward, kernel: Call, backward_kernel: Call, compiled: Call | None = None
) -> Call:
    """Return the call of an operator with positional arguments, of which autograd records the
    derivative.

    compiled: called instead in compiled code. Without it the call can be the operator's
    implementation for the dispatch key Autograd.
    """
    apply = derivative(operator, kernel, backward_kernel)
    apply_plain = derivative(operator, plain.forward(operator), plain.backward(operator))
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
            if plain.replaces_kernels(values[0]):
                return apply_plain(*values)
            raise_refusal(operator, values, error)

    return call


def compiled_call(operator: Forward, overload: Call) -> Call:
    """Return the call in compiled code: one node of the graph, or plain PyTorch for a device
    without kernels."""
    traced = plain.outputs_of(operator)

    def call(*values: Any) -> Any:
        return overload(*values) if has_kernels(values[0].device) else traced(*values)

    return call
