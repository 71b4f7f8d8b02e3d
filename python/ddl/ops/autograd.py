"""Autograd of each operator: `*_setup` saves tensors, `*_grad` returns gradients.

Backwards are operators too, so that compile, checkpointing and export see one node each. An output
without a gradient passes None to `*_grad`: no zeros are materialised.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.functional_tensor import FunctionalTensor

from .outputs import is_absent

_ops = torch.ops.ddl


def rewrite_setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    *tensors, ctx.eps_k = inputs
    ctx.save_for_backward(*tensors, output[1])
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)


def rewrite_grad(ctx: Any, grad_state: Tensor | None, *_: None) -> tuple[Any, ...]:
    if grad_state is None:
        return (None,) * 5
    *inputs, stats = ctx.saved_tensors
    return (*_ops.rewrite_backward(grad_state, *inputs, ctx.eps_k, stats), None)


def read_setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    _save_read(ctx, inputs[:1], inputs[1:], output)


def read_grad(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
    if all(grad is None for grad in grads[:3]):
        return (None,) * 11
    (state,), read, saved = _load_read(ctx, inputs=1)
    grad_state, *parameters = _ops.read_backward(*grads[:3], state, *read, *saved)
    return (grad_state, *_grads_in_schema_order(parameters, grads[1:3]))


def rewrite_read_setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.eps_k = inputs[4]
    _save_read(ctx, inputs[:4], inputs[5:], output[1:])


def rewrite_read_grad(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
    if all(grad is None for grad in grads[:4]):
        return (None,) * 15
    inputs, read, saved = _load_read(ctx, inputs=4)
    arguments = (*inputs, ctx.eps_k, *read, *saved)
    if isinstance(grads[0], FunctionalTensor) and grads[0].device.type == "cpu":
        # torch.compile traces this, and drops the copy if nothing else needs the gradient.
        grad_state = grads[0].clone(memory_format=torch.contiguous_format)
        outputs = grad_state, *_ops.rewrite_read_backward_(grad_state, *grads[1:4], *arguments)
    else:
        outputs = _ops.rewrite_read_backward(*grads[:4], *arguments)
    return (*outputs[:4], None, *_grads_in_schema_order(outputs[4:], grads[2:4]))


def _save_read(
    ctx: Any, inputs: tuple[Tensor, ...], read: tuple[Any, ...], output: tuple[Tensor, ...]
) -> None:
    """Save inputs, parameters and all outputs of the read except the context, numbers on `ctx`."""
    compress, norm_weight, norm_eps, *linear, value_scale, from_compressed, _ = read
    ctx.numbers = (norm_eps, value_scale, from_compressed)
    saved = output[1:]
    ctx.save_for_backward(*inputs, compress, norm_weight, *linear, *saved)
    absent = [out for out in saved[:2] if is_absent(out)]
    ctx.mark_non_differentiable(*absent, *saved[2:])
    ctx.set_materialize_grads(False)


def _load_read(ctx: Any, inputs: int) -> tuple[tuple[Any, ...], tuple[Any, ...], tuple[Any, ...]]:
    """Return (inputs, the read's arguments in schema order, the saved outputs)."""
    tensors = ctx.saved_tensors
    norm_eps, value_scale, from_compressed = ctx.numbers
    parameters, saved = tensors[inputs : inputs + 6], tensors[inputs + 6 :]
    read = (*parameters[:2], norm_eps, *parameters[2:], value_scale, from_compressed)
    return tensors[:inputs], read, saved


def _grads_in_schema_order(parameters: Any, incoming: tuple[Tensor | None, ...]) -> tuple[Any, ...]:
    """Gradients of a read's arguments in schema order.

    None for numbers, for absent parameters, and for parameters of an unused value or gate, so that
    no optimizer decays them. incoming: gradients of the outputs (value, gate).
    """
    compress, norm, *gate, value, value_bias = (
        None if is_absent(grad) else grad for grad in parameters
    )
    value_grad, gate_grad = incoming
    gates = gate if gate_grad is not None else (None, None)
    values = (value, value_bias) if value_grad is not None else (None, None)
    return (compress, norm, None, *gates, *values, None, None, None)


def expand_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:2])


def expand_grad(ctx: Any, grad_state: Tensor) -> tuple[Any, ...]:
    x, weight = ctx.saved_tensors
    grad_x, grad_weight = _ops.expand_backward(grad_state, x, weight)
    return grad_x, None if weight is None else grad_weight, None


def _keys_of_plain_tensors() -> frozenset[int]:
    """Dispatch key sets below autograd of tensors with only a device: no mode, no subclass."""
    keys = torch._C.DispatchKey
    devices = [torch._C.DispatchKeySet(device) for device in (keys.CPU, keys.CUDA)]
    below = [*devices, *(device.add(keys.ADInplaceOrView) for device in devices)]
    return frozenset(keys.raw_repr() for keys in below)


_PLAIN = _keys_of_plain_tensors()
# The fallback is for torch versions without `_any_requires_grad`.
_any_requires_grad: Callable[..., bool] = getattr(torch._C, "_any_requires_grad", None) or (
    lambda *inputs: any(isinstance(x, Tensor) and x.requires_grad for x in inputs)
)


def autograd_implementation(
    operator: Any,
    real: Callable[..., Any],
    setup: Callable[..., None],
    grad: Callable[..., tuple[Any, ...]],
) -> Callable[..., Any]:
    """Return the implementation for the Autograd key; it replaces torch.library's for speed.

    torch.library's fills in default arguments, at 75 µs a call for the fifteen arguments of
    `rewrite_read`; our schemas have no defaults. If no mode or subclass is active below autograd,
    redispatching would only find `real`, after 6 µs, so `real` is called directly.
    """
    redispatch, autograd_is_below = operator.redispatch, torch._C._AutoDispatchBelowAutograd

    def compute(keys: Any, *inputs: Any) -> Any:
        with autograd_is_below():
            return real(*inputs) if keys.raw_repr() in _PLAIN else redispatch(keys, *inputs)

    class Derivative(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, keys: Any, *inputs: Any) -> Any:
            output = compute(keys, *inputs)
            setup(ctx, inputs, output)
            return output

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:
            return (None, *grad(ctx, *grads))

    def implementation(keys: Any, *inputs: Any) -> Any:
        keys = keys & torch._C._after_autograd_keyset
        if torch.is_grad_enabled() and _any_requires_grad(*inputs):
            return Derivative.apply(keys, *inputs)
        return compute(keys, *inputs)

    return implementation


# name → (setup, grad)
DERIVATIVES: dict[str, tuple[Any, Any]] = {
    "rewrite": (rewrite_setup, rewrite_grad),
    "read": (read_setup, read_grad),
    "rewrite_read": (rewrite_read_setup, rewrite_read_grad),
    "expand": (expand_setup, expand_grad),
}
