"""Autograd of the operators, and the call of one.

Backwards are operators too, so that compile, checkpointing and export see one node each. Which
tensors a forward saves and which gradients its backward gets follows from the two declarations: an
argument `grad_x` of the backward is the gradient of the output x, an output `grad_x` that of the
argument x, and any other argument has the name of an argument or output of the forward.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.autograd import forward_ad

from . import private
from .declarations import Operator
from .refusals import raise_refusal

Values = tuple[Any, ...]
# Output → gradients that depend on it alone. If it has no gradient, they are None instead of zero,
# so that no optimizer decays those parameters.
SERVES_ONLY = {
    "new_value": ("grad_value_weight", "grad_value_bias"),
    "new_gate": ("grad_gate_weight", "grad_gate_bias"),
}


def _picker(positions: Sequence[int]) -> Callable[[Values], Values]:
    """Return a function that picks the values at these positions."""
    if len(positions) > 1:
        return itemgetter(*positions)
    return lambda values: tuple([values[position] for position in positions])


class Wiring:
    """Where the arguments and the results of a backward come from and go to, found by name once."""

    def __init__(self, forward: Operator, backward: Operator) -> None:
        arguments = forward.names
        reads = set(backward.names)
        tensors = [name for name in forward.tensors if name in reads]
        outputs = [name for name in forward.outputs if name in reads]
        lists = [name for name in forward.lists if name in reads]
        others = {*forward.tensors, *lists}
        numbers = [name for name in arguments if name in reads and name not in others]
        self._inputs_to_save = _picker([arguments.index(name) for name in tensors])
        self.outputs_to_save = _picker([forward.outputs.index(name) for name in outputs])
        self.numbers_to_save = _picker([arguments.index(name) for name in numbers])
        self._anchor = arguments.index("anchor") if lists else None
        self._chain = arguments.index("chain") if lists else None
        self._before_chain = len(tensors) + len(outputs)
        self.without_gradient = _picker([
            at for at, name in enumerate(forward.outputs) if f"grad_{name}" not in reads
        ])  # fmt: skip
        given = [f"grad_{name}" for name in forward.outputs]
        given += [*tensors, *outputs, *numbers, *lists, "wanted"]
        self._arguments = [given.index(name) for name in backward.names]
        self._pick_arguments = _picker(self._arguments)
        results = backward.outputs
        self.sources = [arguments.index(name.removeprefix("grad_")) for name in results]
        self.gradient_of: list[int | None] = [
            results.index(f"grad_{name}") if f"grad_{name}" in results else None
            for name in arguments
        ]
        self.unreached = [
            (forward.outputs.index(output), sum(1 << results.index(name) for name in served))
            for output, served in SERVES_ONLY.items()
            if output in forward.outputs
        ]

        self._known: dict[Values, tuple[int, list[int | None]]] = {}

    def wanted(self, needs: Sequence[bool], grads: Values) -> tuple[int, list[int | None]]:
        """Return a bit for every gradient that is needed and that any incoming one reaches.

        And for every argument of the forward the position of its gradient among the results.
        """
        key = (*needs, *(grads[output] is None for output, _ in self.unreached))
        known = self._known.get(key) if not torch.compiler.is_compiling() else None
        if known is not None:
            return known
        wanted = sum(1 << bit for bit, source in enumerate(self.sources) if needs[source])
        for output, served in self.unreached:
            if grads[output] is None:
                wanted &= ~served
        positions = [at if at is not None and wanted >> at & 1 else None for at in self.gradient_of]
        if not torch.compiler.is_compiling():
            self._known[key] = wanted, positions
        return wanted, positions

    def tensors_to_save(self, inputs: Values, outputs: Values) -> Values:
        """Return the tensors that the backward uses: the anchor for the state, the chain last."""
        tensors = self._inputs_to_save(inputs)
        if self._anchor is None or self._chain is None or inputs[self._anchor] is None:
            return (*tensors, *self.outputs_to_save(outputs))
        state_and_others = (inputs[self._anchor], *tensors[1:])
        return (*state_and_others, *self.outputs_to_save(outputs), *(inputs[self._chain] or ()))

    def backward_arguments(
        self, grads: Values, saved: Values, numbers: Values, wanted: int
    ) -> Values:
        """Pick the backward's arguments from incoming gradients and what was saved."""
        if self._chain is None:
            given = (*grads, *saved, *numbers, wanted)
        else:
            before = self._before_chain
            given = (*grads, *saved[:before], *numbers, list(saved[before:]), wanted)
        if torch.compiler.is_compiling():  # compiled autograd does not know itemgetter
            return tuple([given[position] for position in self._arguments])
        return self._pick_arguments(given)


def derivative(
    forward: Operator, backward: Operator, overwriting: Operator | None = None
) -> tuple[Callable[..., None], Callable[..., Values]]:
    """Return (setup, grad) as torch.library.register_autograd takes them.

    overwriting: a backward without its first result, which overwrites its first argument.
    """
    wiring = Wiring(forward, backward)
    single = len(forward.outputs) == 1

    def setup(ctx: Any, inputs: Values, output: Any) -> None:
        outputs = (output,) if single else output
        ctx.save_for_backward(*wiring.tensors_to_save(inputs, outputs))
        ctx.numbers = wiring.numbers_to_save(inputs)
        ctx.mark_non_differentiable(*wiring.without_gradient(outputs))
        ctx.set_materialize_grads(False)

    def grad(ctx: Any, *grads: Tensor | None) -> Values:
        if all(grad is None for grad in grads):
            return (None,) * len(forward.names)
        wanted, positions = wiring.wanted(ctx.needs_input_grad, grads)
        given = wiring.backward_arguments(grads, ctx.saved_tensors, ctx.numbers, wanted)
        if overwriting and _may_overwrite(given[0]):
            # torch.compile traces this, and drops the copy if nothing else needs the gradient.
            grad_new_state, *others = given
            grad_state = grad_new_state.clone(memory_format=torch.contiguous_format)
            results = (grad_state, *call(overwriting, grad_state, *others))
        else:
            results = call(backward, *given)
        return tuple([None if at is None else results[at] for at in positions])

    return setup, grad


def for_torch_library(grad: Callable[..., Values]) -> Callable[..., Values]:
    """Return `grad` as torch.library wants it: gradients as arguments came to it.

    They come without those that equal their defaults, and for a list of tensors it wants a list.
    """

    def gradients(ctx: Any, *grads: Tensor | None) -> Values:
        needs = ctx.needs_input_grad
        ctx.needs_input_grad = tuple([need is True for need in needs])
        found = grad(ctx, *grads)
        return tuple([
            [None] * len(need) if isinstance(need, list) else gradient
            for need, gradient in zip(needs, found, strict=False)
        ])  # fmt: skip

    return gradients


def _may_overwrite(grad: Tensor | None) -> bool:
    return grad is not None and private.is_traced_for_compile(grad) and grad.device.type == "cpu"


# --- calls ----------------------------------------------------------------------------------------

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
    operator: Operator, setup: Callable[..., None], grad: Callable[..., Values]
) -> Callable[..., Any]:
    """Return the operator's implementation for the Autograd key, which is its direct call, too.

    It replaces torch.library's for speed: that one fills in default arguments, at 75 µs a call for
    the arguments of `rewrite_read`.
    """
    entry, below_autograd = private.entry_of(OVERLOADS[operator.name]), private.below_autograd
    in_transform, any_requires_grad = private.in_transform, private.any_requires_grad
    is_grad_enabled, level = torch.is_grad_enabled, private.forward_mode_level

    class Derivative(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *inputs: Any) -> Any:
            with below_autograd():
                output = entry(*inputs)
            setup(ctx, inputs, output)
            return output

        backward = staticmethod(grad)

    apply = private.apply_of(Derivative)

    count, defaults = len(operator.names), operator.defaults

    def direct(*inputs: Any) -> Any:
        if len(inputs) < count:  # torch drops arguments that equal their defaults
            inputs = (*inputs, *defaults[len(inputs) - count :])
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


def guarded(operator: Operator) -> Callable[..., Any]:
    """Return the operator's direct call where torch.library differentiates it."""
    overload = OVERLOADS[operator.name]

    def direct(*inputs: Any) -> Any:
        refuse_transforms(operator, inputs)
        try:
            return overload(*inputs)
        except (RuntimeError, TypeError) as error:
            raise_refusal(operator, inputs, error)

    return direct


def refuse_transforms(operator: Operator, inputs: Values) -> None:
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


def refuse_recording(ctx: Any, inputs: Values, output: Any) -> NoReturn:
    """Raise ValueError in place of a setup."""
    raise ValueError(
        "a cached read must be called under torch.no_grad() or torch.inference_mode(), got a call "
        "that records gradients"
    )


def refuse_derivative(kind: str, operator: Operator) -> NoReturn:
    name = operator.name.removesuffix("_").removesuffix("_backward")
    raise NotImplementedError(
        f"{kind} of `ddl.{name}` must go through `ddl.reference.{name}`, "
        "got the fused operator, which has first reverse-mode derivatives only"
    )
