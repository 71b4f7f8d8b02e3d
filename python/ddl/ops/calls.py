"""The call of an operator: its overload in compiled code; in eager code its derivative is recorded
here if one is needed, and the dispatcher is entered below autograd."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from . import private
from .declarations import Operator
from .refusals import raise_refusal

# Operator name → its overload, torch.ops.ddl.<name>.default.
OVERLOADS: dict[str, Any] = {}
# Operator name → its call in eager code, with positional arguments. It is what the overload would
# do, without a round trip through the dispatcher where nothing but autograd listens.
DIRECT: dict[str, Callable[..., Any]] = {}


def call(operator: Operator, *values: Any) -> Any:
    """Call an operator with positional arguments."""
    calls = OVERLOADS if torch.compiler.is_compiling() else DIRECT
    return calls[operator.name](*values)


def differentiable(
    operator: Operator, save: Callable[..., None], gradients: Callable[..., Any]
) -> Callable[..., Any]:
    """Return the operator's implementation for the Autograd key, which is its direct call, too.

    save(ctx, inputs, output) and gradients(ctx, *grads) are those of a torch.autograd.Function.
    torch.library.register_autograd would fill in default arguments at each call: 75 µs for those of
    `rewrite_read`.
    """
    entry, below_autograd = private.entry_of(OVERLOADS[operator.name]), private.below_autograd
    in_transform, any_requires_grad = private.in_transform, private.any_requires_grad
    is_grad_enabled, level = torch.is_grad_enabled, private.forward_mode_level

    class Derivative(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *inputs: Any) -> Any:
            with below_autograd():
                output = entry(*inputs)
            save(ctx, inputs, output)
            return output

        backward = staticmethod(gradients)

    apply = private.apply_of(Derivative)

    def direct(*inputs: Any) -> Any:
        if level() >= 0 or in_transform():
            refuse_transforms(operator, inputs)
        try:
            if is_grad_enabled() and any_requires_grad(*inputs):
                return apply(*inputs)
            with below_autograd():
                return entry(*inputs)
        except (RuntimeError, TypeError) as error:
            raise_refusal(operator, inputs, error)

    return direct


def refuse_transforms(operator: Operator, inputs: tuple[Any, ...]) -> None:
    """Raise NotImplementedError under forward-mode differentiation and torch.func transforms."""
    for name, value in zip(operator.names, inputs, strict=True):
        if isinstance(value, Tensor) and forward_ad.unpack_dual(value).tangent is not None:
            raise NotImplementedError(
                f"`{name}` must come without a forward-mode tangent, got a dual tensor: the fused "
                "operators have reverse-mode derivatives only, use `ddl.reference`"
            )
    if private.in_transform() and not torch.compiler.is_compiling():
        raise NotImplementedError(
            "the fused operators must be called outside of torch.func transforms "
            "(vmap, grad, vjp, jvp, …), got a call inside one: use `ddl.reference` there"
        )
