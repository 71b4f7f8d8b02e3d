"""Operators to measure: random arguments, bytes to move, and the check against `ddl.reference`."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ddl import reference

from .measure import compare
from .traffic import moved

OPS = ("rewrite", "read", "rewrite_read", "expand")
TAPS = 4
LONGEST = 256  # tokens in a sequence, unless a case says otherwise
# Allowed rms error relative to the scale of a tensor, by the coarser of its own type and the
# state's. The operators are accurate to 5e-6 in float32 (80 units in the last place) and to 2.5
# units in bfloat16 (tests/support/tolerances.py); parameter gradients here are sums over 2^14
# tokens and more.
TOLERANCES = {torch.float32: 2e-5, torch.bfloat16: 1e-2}
AT_ONCE = 2**26  # most elements of a state that the reference takes at once, in float64
SCALES = {"gate_bias": "gate_weight", "value_bias": "value_weight"}
PER_TOKEN = ("state", "direction", "value", "gate", "x")

Operator = Callable[..., Any]  # with the signature of its namesake in `ddl.functional`


@dataclass(frozen=True)
class Case:
    """One operator at one size."""

    op: str
    form: str  # of the read: identity, channel, token; of the expansion: repeat, conv; else ""
    d: int
    m: int
    batch: int
    time: int
    state: torch.dtype = torch.float32  # of X, x and parameters
    features: torch.dtype = torch.float32  # of k and h
    rewrites: int = 1  # one after the other; so many are read for, too

    @property
    def name(self) -> str:
        name = f"{self.op} {self.form} d={self.d} m={self.m}".replace("  ", " ")
        return f"{name} n={self.rewrites}" if self.rewrites > 1 else name

    @property
    def axis(self) -> tuple[int, ...]:
        """The axis of several rewrites."""
        return (self.rewrites,) if self.rewrites > 1 else ()

    def sizes(self) -> dict[str, Any]:
        """The case as JSON types, without its dtypes."""
        names = ("op", "form", "d", "m", "rewrites", "batch", "time")
        return {name: getattr(self, name) for name in names}


@dataclass
class Problem:
    """A case's arguments, and the bytes that one call must move."""

    inputs: dict[str, Tensor]  # tensors, all with gradients
    numbers: dict[str, Any]
    forward_bytes: int
    backward_bytes: int
    state: Tensor  # its size is the size of the copies to compare with

    @property
    def leaves(self) -> list[Tensor]:
        return list(self.inputs.values())

    def outputs(self, op: Operator) -> list[Tensor]:
        return tensors(op(**self.inputs, **self.numbers))


def tensors(result: Any) -> list[Tensor]:
    """The tensors that an operator returned."""
    every = result if isinstance(result, tuple) else (result,)
    return [tensor for tensor in every if tensor is not None]


def forms_of(op: str, m: int) -> tuple[str, ...]:
    """The forms that an operator has for m value channels."""
    if op in ("read", "rewrite_read"):
        return ("identity" if m == 1 else "channel", "token")
    if op == "expand":
        return ("conv",) if m == 1 else ("repeat", "conv")
    return ("",)


def build(case: Case, device: str | torch.device = "cpu", seed: int = 0) -> Problem:
    """Random arguments, scaled as in a model, and the bytes of one call."""
    generator = torch.Generator(device).manual_seed(seed)
    d, m, batch = case.d, case.m, (case.batch, case.time)

    def normal(*shape: int, scale: float = 1.0, dtype: torch.dtype = case.state) -> Tensor:
        drawn = torch.randn(shape, generator=generator, device=device, dtype=dtype)
        return drawn.mul_(scale).requires_grad_()

    element = {"state": case.state.itemsize, "features": case.features.itemsize}
    per_feature = moved(case.op, case.form, m, rewrites=case.rewrites, **element)
    forward, backward = (case.batch * case.time * d * count for count in per_feature)
    if case.op == "expand":
        inputs = {"x": normal(*batch, d)}
        if case.form == "conv":
            inputs["weight"] = normal(d, m, TAPS, scale=0.5)
        state = normal(*batch, d, m).detach()
        return Problem(inputs, {"value_channels": m}, forward, backward, state)

    inputs = {"state": normal(*batch, d, m)}
    numbers: dict[str, Any] = {}
    if case.op != "read":
        each = (*batch, *case.axis)
        inputs["direction"] = normal(*each, d, dtype=case.features)
        inputs["value"] = normal(*each, m, dtype=torch.float32)
        drawn = torch.rand(each, generator=generator, device=device)
        inputs["gate"] = drawn.mul_(2).requires_grad_()
        numbers["eps_k"] = 0.02 * math.sqrt(d)
    if case.op != "rewrite":
        inputs |= read_parameters(case, normal)
        if case.features != case.state:
            numbers["context_dtype"] = case.features
    return Problem(inputs, numbers, forward, backward, inputs["state"])


def read_parameters(case: Case, normal: Any) -> dict[str, Tensor]:
    """Parameters of a read with a gate and a linear value, as between two sublayers."""
    d, m, each = case.d, case.m, case.axis
    parameters = {
        "norm_weight": normal(d),
        "gate_weight": normal(*each, d, scale=d**-0.5),
        "gate_bias": normal(*each),
        "value_weight": normal(*each, m, d, scale=d**-0.5),
        "value_bias": normal(*each, m),
    }
    if case.form != "identity":
        taps = (TAPS,) if case.form == "token" else ()
        parameters["compress"] = normal(d, m, *taps, scale=1 / m)
    return parameters


def cotangents(outputs: list[Tensor]) -> list[Tensor]:
    """Fixed random gradients of the outputs."""
    generator = torch.Generator(outputs[0].device).manual_seed(1)
    return [
        torch.randn(output.shape, generator=generator, device=output.device, dtype=output.dtype)
        for output in outputs
    ]


def check(
    case: Case,
    problem: Problem,
    op: Operator,
    tolerances: Mapping[torch.dtype, float] = TOLERANCES,
) -> float:
    """Compare outputs and all gradients with the reference in float64.

    Returns the largest error divided by its tolerance, or raises MismatchError. The reference takes
    a few sequences at a time, so that it has memory for the sizes that are timed.
    """
    outputs = problem.outputs(op)
    incoming = cotangents(outputs)
    found = torch.autograd.grad(outputs, problem.leaves, incoming)
    grads = dict(zip(problem.inputs, found, strict=True))
    sums: dict[str, Tensor] = {}
    worst = 0.0
    for part in _parts(case):
        right, exact_grads = _reference(case, problem, part, incoming)
        pairs = {f"output {i}": (outputs[i][part], tensor) for i, tensor in enumerate(right)}
        for name, gradient in exact_grads.items():
            if name in PER_TOKEN:
                pairs[name] = (grads[name][part], gradient)
            else:
                sums[name] = sums.get(name, torch.zeros_like(gradient)) + gradient
        worst = max(worst, _share(case, pairs, tolerances))
    if sums:
        pairs = {name: (grads[name], gradient) for name, gradient in sums.items()}
        worst = max(worst, _share(case, pairs, tolerances))
    return worst


def _parts(case: Case) -> Iterator[slice]:
    """The sequences in slices small enough for the reference."""
    count = max(1, AT_ONCE // (case.time * case.d * case.m))
    for first in range(0, case.batch, count):
        yield slice(first, first + count)


def _reference(
    case: Case, problem: Problem, part: slice, incoming: list[Tensor]
) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Outputs and gradients by name, in float64, of the sequences in `part`."""
    inputs = {
        name: (tensor[part] if name in PER_TOKEN else tensor)
        for name, tensor in problem.inputs.items()
    }
    inputs = {name: tensor.detach().double().requires_grad_() for name, tensor in inputs.items()}
    numbers = {name: x for name, x in problem.numbers.items() if name != "context_dtype"}
    outputs = tensors(getattr(reference, case.op)(**inputs, **numbers))
    given = [gradient[part].double() for gradient in incoming]
    grads = torch.autograd.grad(outputs, list(inputs.values()), given)
    return [output.detach() for output in outputs], dict(zip(inputs, grads, strict=True))


def _share(
    case: Case,
    pairs: Mapping[str, tuple[Tensor, Tensor]],
    tolerances: Mapping[torch.dtype, float],
) -> float:
    """The largest error divided by its tolerance."""
    alike: dict[float, dict[str, tuple[Tensor, Tensor]]] = {}
    for name, pair in pairs.items():
        coarsest = max(pair[0].dtype, case.state, key=lambda dtype: torch.finfo(dtype).eps)
        alike.setdefault(tolerances[coarsest], {})[name] = pair
    scales = {bias: weight for bias, weight in SCALES.items() if weight in pairs}
    return max(compare(group, allowed, scales) / allowed for allowed, group in alike.items())
