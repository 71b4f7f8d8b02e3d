"""The operators in plain PyTorch, from `ddl.reference`: the kernels of devices without native ones.

The delta rule over time is not a loop there, but goes in chunks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ddl import reference
from ddl.results import ERASE, ReadParameters

from . import chunked
from .checks import gate_dtype
from .declarations import Forward
from .devices import has_kernels
from .refusals import check

Call = Callable[..., Any]


def outputs_of(operator: Forward) -> Call:
    """Return the call of an operator in plain PyTorch, which autograd can differentiate: all
    outputs, None for those that only backwards need."""
    compute = _PLAIN[operator.name]

    def outputs(*values: Any) -> Any:
        if not torch.compiler.is_compiling():
            has_kernels(values[0].device, operator.on_cpus_alone)  # warns
            check(operator, values)
        results = compute(operator.Arguments(*values))
        return tuple([results.get(name) for name in operator.outputs])

    return outputs


def or_plain(operator: Forward, call: Call) -> Call:
    """Return the call, or plain PyTorch in place of it for a device without kernels."""
    in_plain_torch = outputs_of(operator)

    def choose(*values: Any) -> Any:
        native = has_kernels(values[0].device, operator.on_cpus_alone)
        return (call if native else in_plain_torch)(*values)

    return choose


def _rewrite(args: Any) -> dict[str, Tensor | None]:
    operands = args.state, args.direction, args.value, args.gate
    return {"new_state": reference.rewrite(*operands, eps_k=args.eps_k, erase=ERASE[args.erase])}


def _read_of(args: Any, state: Tensor, **changes: Any) -> dict[str, Tensor | None]:
    parameters = ReadParameters._make([getattr(args, name) for name in ReadParameters._fields])
    given = {**parameters.keywords(), "document_starts": args.document_starts, **changes}
    result = reference.read(state, **given)
    return {"context": result.context, "new_value": result.value, "new_gate": result.gate}


def _read(args: Any) -> dict[str, Tensor | None]:
    state, compress = args.state, args.compress
    taps = compress.shape[2] if compress is not None and compress.ndim == 3 else 1
    if args.saves or taps == 1 or state.shape[-3] == 0:
        return _read_of(args, state)
    # A read of x, to which the tokens before these have added, and what these leave.
    time = state.shape[-3]
    padding = state.new_zeros(*state.shape[:-3], taps - 1, *state.shape[-2:])
    starts = args.document_starts
    longer = reference.read(
        torch.cat((state, padding), dim=-3).to(gate_dtype(state)),
        compress=compress,
        norm_eps=None,
        document_starts=None if starts is None else F.pad(starts, (0, taps - 1)),
    ).context
    if args.pending is not None:
        pending = args.pending
        if starts is not None:  # the first document continues until another starts
            ended = F.pad(starts, (0, taps - 1)).cummax(-1).values[..., : taps - 1]
            pending = pending.masked_fill(ended.unsqueeze(-1), 0)
        longer[..., : taps - 1, :] += pending
    x = longer[..., :time, :].to(state.dtype).unsqueeze(-1)
    results = _read_of(args, x, compress=None, document_starts=None)
    return results | {"new_pending": longer[..., time:, :].clone()}


def _rewrite_read(args: Any) -> dict[str, Tensor | None]:
    rewritten = _rewrite(args)
    return rewritten | _read(args._replace(state=rewritten["new_state"]))


def _expand(args: Any) -> dict[str, Tensor | None]:
    x, weight, m, starts = args.x, args.weight, args.value_channels, args.document_starts
    taps = 1 if weight is None else weight.shape[2]
    if args.saves or taps == 1 or x.shape[-2] == 0:
        return {"state": reference.expand(x, weight, value_channels=m, document_starts=starts)}
    before = args.before
    if before is None:
        before = x.new_zeros(*x.shape[:-2], taps - 1, x.shape[-1])
    joined = torch.cat((before, x), dim=-2)
    if starts is not None:
        starts = F.pad(starts, (taps - 1, 0))
    state = reference.expand(joined, weight, value_channels=m, document_starts=starts)
    new_before = joined[..., x.shape[-2] :, :].clone()
    if starts is not None:  # only the last document continues
        later = F.pad(starts, (0, 1))[..., x.shape[-2] + 1 :]
        ended = later.flip(-1).cummax(-1).values.flip(-1)
        new_before.masked_fill_(ended.unsqueeze(-1), 0)
    return {"state": state[..., taps - 1 :, :, :].contiguous(), "new_before": new_before}


def _delta_rule(args: Any) -> dict[str, Tensor | None]:
    y, final_state = chunked.delta_rule(args)
    return {"y": y, "final_state": final_state}


_PLAIN: dict[str, Callable[[Any], dict[str, Tensor | None]]] = {
    "rewrite": _rewrite,
    "read": _read,
    "rewrite_read": _rewrite_read,
    "expand": _expand,
    "delta_rule": _delta_rule,
}
