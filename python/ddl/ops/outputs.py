"""Fake implementations: the outputs of every operator, with shapes and dtypes and without data.

They run for torch.compile, export and the meta device, after the checks of native code, which
checks and allocates for real tensors. An absent output is None.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ddl._native import CHUNK_STEPS

from . import private
from .checks import gate_dtype
from .chunked import queries_of, steps_of
from .declarations import FORWARDS, OPERATORS, Operator, overwriting_backward
from .refusals import check

Outputs = dict[str, Tensor | None]


def _like(tensor: Tensor) -> Tensor:
    return tensor.new_empty(tensor.shape)


def _rewrite(args: Any) -> Outputs:
    return {"new_state": _like(args.state), "stats": _stats(args) if args.saves else None}


def _stats(args: Any) -> Tensor | None:
    """Those of all rewrites, r and p of each and the products of each two directions; 1/rms."""
    *batch, _, m = args.state.shape
    each = int(getattr(args, "norm_eps", None) is not None)
    if hasattr(args, "direction"):
        n = 1 if args.direction.ndim < args.state.ndim else args.direction.shape[-2]
        each += n * (1 + m) + n * (n - 1) // 2
    numbers = math.prod(batch) * each
    return args.state.new_empty(numbers, dtype=gate_dtype(args.state)) if each else None


def _read(args: Any) -> Outputs:
    state, compress = args.state, args.compress
    *batch, d, m = state.shape
    real, over_time = gate_dtype(state), compress is not None and compress.ndim == 3
    n: tuple[Any, ...] = ()
    if args.gate_weight is not None:
        n = tuple(args.gate_weight.shape[:-1])
    elif args.value_weight is not None:
        n = tuple(args.value_weight.shape[:-2])
    taps, pending = compress.shape[2] if over_time else 1, None
    if not args.saves and taps > 1 and _has_tokens(batch):
        pending = state.new_empty((*batch[:-1], taps - 1, d), dtype=real)
    new = state.new_empty
    return {
        "context": new((*batch, d), dtype=args.context_dtype),  # None means the state's dtype
        "new_value": None if args.value_weight is None else new((*batch, *n, m), dtype=real),
        "new_gate": None if args.gate_weight is None else new((*batch, *n), dtype=real),
        "stats": _stats(args) if args.saves else None,
        "compressed": new((*batch, d)) if args.saves and over_time else None,
        "new_pending": pending,
    }


def _has_tokens(batch: Any) -> bool:
    """False for sequences (…, T) of no tokens, which leave nothing."""
    *sequences, time = batch
    return isinstance(time, torch.SymInt) or time > 0 or 0 in sequences


def _rewrite_read(args: Any) -> Outputs:
    return _rewrite(args) | _read(args)


def _expand(args: Any) -> Outputs:
    x, weight = args.x, args.weight
    taps, before = 1 if weight is None else weight.shape[2], None
    if not args.saves and taps > 1 and _has_tokens(x.shape[:-1]):
        before = x.new_empty((*x.shape[:-2], taps - 1, x.shape[-1]))
    return {"state": x.new_empty((*x.shape, args.value_channels)), "new_before": before}


def _delta_rule(args: Any) -> Outputs:
    q, v = args.q, args.v
    (B, T, _, K), H, V = q.shape, args.beta.shape[-1], v.shape[-1]
    real, chunks = gate_dtype(q), -(-T // max(1, CHUNK_STEPS // steps_of(args)))
    errors = states = None
    if args.saves:
        errors = q.new_empty((*v.shape[:-2], H, V), dtype=real)
        states = q.new_empty((B, H, chunks, K, V), dtype=real)
    return {
        "y": v.new_empty((B, T, H * queries_of(args), V)),
        "final_state": q.new_empty((B, H, K, V), dtype=real),
        "errors": errors,
        "states": states,
    }


_FORWARDS: dict[str, Callable[[Any], Outputs]] = {
    "rewrite": _rewrite,
    "read": _read,
    "rewrite_read": _rewrite_read,
    "expand": _expand,
    "delta_rule": _delta_rule,
}


def _gradients(operator: Operator) -> Callable[[Any], Outputs]:
    """A backward's outputs: like the arguments that they are gradients of, if wanted."""
    names = [output.removeprefix("grad_") for output in operator.outputs]
    # Bit 0 is the state's gradient, which is no output of the backward that overwrites it.
    first = int(operator is overwriting_backward)

    def outputs(args: Any) -> Outputs:
        results: Outputs = {}
        for bit, name in enumerate(names, start=first):
            tensor = getattr(args, name)
            wanted = operator.kinds[name] == "Tensor" or args.wanted >> bit & 1
            results[f"grad_{name}"] = _like(tensor) if tensor is not None and wanted else None
        return results

    return outputs


def fake(operator: Operator) -> Callable[..., Any]:
    """Return the fake implementation of an operator."""
    compute = _FORWARDS.get(operator.name) or _gradients(operator)

    def outputs(*values: Any) -> Any:
        # The fake implementations of a graph always run before inductor lowers it.
        private.allow_inductor_fallback(*(f"ddl::{other.name}" for other in OPERATORS))
        if operator in FORWARDS:
            check(operator, values)
        results = compute(operator.Arguments(*values))
        return tuple([results[name] for name in operator.outputs])

    return outputs
