"""The operators in plain PyTorch, for devices without kernels: checks, then `ddl.reference`.

The delta rule over time is not a loop there, but goes in chunks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ddl import reference
from ddl.results import ERASE

from . import chunked, declarations
from .arguments import CHECKS
from .checks import gate_dtype
from .declarations import Operator

_READ = [
    name
    for name in declarations.read.names
    if name not in ("state", "value_from_compressed", "context_dtype")
]


def _rewrite(given: Any) -> tuple[Tensor]:
    state = reference.rewrite(
        given.state,
        given.direction,
        given.value,
        given.gate,
        eps_k=given.eps_k,
        erase=ERASE[given.erase],
    )
    return (state,)


def _read(given: Any, state: Tensor | None = None) -> tuple[Tensor | None, ...]:
    parameters = {name: getattr(given, name) for name in _READ}
    found = reference.read(
        given.state if state is None else state,
        **parameters,
        value_from="compressed" if given.value_from_compressed else "context",
        context_dtype=given.context_dtype,
    )
    return found[:3]


def _rewrite_read(given: Any) -> tuple[Tensor | None, ...]:
    (new_state,) = _rewrite(given)
    return (new_state, None, *_read(given, new_state))


def _cached_read(given: Any, state: Tensor | None = None) -> tuple[Tensor | None, ...]:
    """A read of x, to which the tokens before these have added; and what these leave."""
    state, compress = given.state if state is None else state, given.compress
    if compress is None or compress.ndim < 3 or compress.shape[2] == 1:
        return (*_read(given, state), None)
    taps, time = compress.shape[2], state.shape[-3]
    padding = state.new_zeros(*state.shape[:-3], taps - 1, *state.shape[-2:])
    starts = given.document_starts
    longer = reference.read(
        torch.cat((state, padding), dim=-3).to(gate_dtype(state)),
        compress=compress,
        norm_eps=None,
        document_starts=None if starts is None else F.pad(starts, (0, taps - 1)),
    ).context
    if given.pending is not None:
        pending = given.pending
        if starts is not None:  # the first document goes on until another starts
            ended = F.pad(starts, (0, taps - 1)).cummax(-1).values[..., : taps - 1]
            pending = pending.masked_fill(ended.unsqueeze(-1), 0)
        longer[..., : taps - 1, :] += pending
    x = longer[..., :time, :].to(state.dtype).unsqueeze(-1)
    only = given._replace(compress=None, document_starts=None)
    return (*_read(only, x), longer[..., time:, :].clone())


def _cached_rewrite_read(given: Any) -> tuple[Tensor | None, ...]:
    (new_state,) = _rewrite(given)
    return (new_state, *_cached_read(given, new_state))


def _expand(given: Any) -> Tensor:
    return reference.expand(
        given.x,
        given.weight,
        value_channels=given.value_channels,
        document_starts=given.document_starts,
    )


def _cached_expand(given: Any) -> tuple[Tensor, Tensor | None]:
    x, weight, m = given.x, given.weight, given.value_channels
    taps = 1 if weight is None else weight.shape[2]
    if taps == 1:
        return reference.expand(x, weight, value_channels=m), None
    before = given.before
    if before is None:
        before = x.new_zeros(*x.shape[:-2], taps - 1, x.shape[-1])
    joined, starts = torch.cat((before, x), dim=-2), given.document_starts
    if starts is not None:
        starts = F.pad(starts, (taps - 1, 0))
    state = reference.expand(joined, weight, value_channels=m, document_starts=starts)
    new_before = joined[..., x.shape[-2] :, :].clone()
    if starts is not None:  # only the last document goes on
        later = F.pad(starts, (0, 1))[..., x.shape[-2] + 1 :]
        ended = later.flip(-1).cummax(-1).values.flip(-1)
        new_before.masked_fill_(ended.unsqueeze(-1), 0)
    return state[..., taps - 1 :, :, :].contiguous(), new_before


_PLAIN: dict[str, Callable[[Any], Any]] = {
    "rewrite": _rewrite,
    "read": _read,
    "rewrite_read": _rewrite_read,
    "expand": _expand,
    "cached_read": _cached_read,
    "cached_rewrite_read": _cached_rewrite_read,
    "cached_expand": _cached_expand,
    "delta_rule": chunked.delta_rule,
}


def run_plain(operator: Operator, given: Any) -> Any:
    """Return the operator's outputs, None for those without gradients."""
    CHECKS[operator.name](given)
    outputs = _PLAIN[operator.name](given)
    if not isinstance(outputs, tuple):
        return outputs
    return (*outputs, *[None] * (len(operator.outputs) - len(outputs)))
