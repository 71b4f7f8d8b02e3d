"""The call of an operator.

In compiled code it is the overload `default`, one node of the graph. In eager code a derivative is
recorded around the overload `kernel`, and what torch or native code refused is explained.
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


def eager_call(operator: Forward, kernel: Call, backward_kernel: Call) -> Call:
    """Return the call in eager code, of which autograd records the derivative. It is the
    operator's implementation for the dispatch key Autograd, too."""
    apply = derivative(operator, kernel, backward_kernel)
    apply_plain = derivative(operator, plain.forward(operator), plain.backward(operator))
    is_grad_enabled, is_inference = torch.is_grad_enabled, torch.is_inference_mode_enabled
    operands, unpack_dual = operator.operands, forward_ad.unpack_dual

    def call(*values: Any) -> Any:
        try:
            if is_grad_enabled():
                return apply(*values)
            if not is_inference():
                for tensor in values[:operands]:
                    if unpack_dual(tensor).tangent is not None:
                        refuse_tangents(operator, values)
            return kernel(*values)
        except (RuntimeError, TypeError) as error:
            if plain.replaces_kernels(values[0]):
                return apply_plain(*values)
            raise_refusal(operator, values, error)

    return call


def any_call(operator: Forward, overload: Call, eager: Call) -> Call:
    """Return the call in eager and in compiled code, with positional arguments."""
    is_compiling, traced = torch.compiler.is_compiling, plain.outputs_of(operator)

    def call(*values: Any) -> Any:
        if not is_compiling():
            return eager(*values)
        return overload(*values) if has_kernels(values[0].device) else traced(*values)

    return call
