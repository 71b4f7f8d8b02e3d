"""Argument checks for tensors without data, and for calls that torch or native code refused.

Native code checks real tensors (src/problem/), where it costs nothing, with the same messages.
Numbers are checked as in ddl/options.py; torch.compile's symbolic numbers are accepted, too.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from numbers import Integral, Real
from typing import Any

import torch
from torch import Tensor

from ddl import options
from ddl._native import LEAST_EPS_K, LEAST_NORM_EPS, MOST_REWRITES

STORED = (torch.float32, torch.bfloat16, torch.float16)


def gate_dtype(state: Tensor) -> torch.dtype:
    """The dtype of values, gates and statistics: float64 for a float64 state, else float32."""
    return torch.float64 if state.dtype == torch.float64 else torch.float32


def autocast_dtype(tensor: Tensor) -> torch.dtype | None:
    """Return autocast's dtype for a tensor; None if autocast is off there, or leaves it alone."""
    device = tensor.device.type
    if tensor.dtype == torch.float64 or device == "meta":  # meta tensors have no autocast
        return None
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None


# --- one tensor -----------------------------------------------------------------------------------


def check_is_tensor(name: str, tensor: Any) -> None:
    """Raise TypeError unless `tensor` is a torch.Tensor."""
    if not isinstance(tensor, Tensor):
        raise TypeError(f"`{name}` must be a torch.Tensor, got {type(tensor).__name__}")


def is_distributed(tensor: Tensor) -> bool:
    """Whether a tensor is a DTensor, of which each process has a part."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def check_is_plain(name: str, tensor: Any, must: str = "be") -> None:
    """Raise TypeError unless `tensor`, which an argument must "be" or "return", is no DTensor."""
    check_is_tensor(name, tensor)
    if is_distributed(tensor):
        raise TypeError(
            f"`{name}` must {must} a plain tensor, got a DTensor, of which each process has a part:"
            " the stream can be sharded as a whole, by fully_shard, but neither tensor nor"
            " sequence parallelism over it is there"
        )


def check_is_dense(name: str, tensor: Any) -> None:
    """Raise TypeError unless `tensor` is a dense torch.Tensor."""
    check_is_plain(name, tensor)
    if tensor.is_nested or tensor.layout is not torch.strided:
        got = "a nested tensor" if tensor.is_nested else f"layout {tensor.layout}"
        raise TypeError(f"`{name}` must be a dense tensor, got {got}")


def check_shape(name: str, tensor: Tensor, expected: Sequence[Any]) -> None:
    """Raise ValueError unless `tensor` has shape `expected`."""
    if tuple(tensor.shape) != tuple(expected):
        raise ValueError(f"`{name}` must have shape {tuple(expected)}, got {tuple(tensor.shape)}")


def check_dtype(name: str, tensor: Tensor) -> None:
    """Raise TypeError unless the operators support the dtype of `tensor`."""
    if tensor.dtype not in STORED and tensor.dtype != torch.float64:
        raise TypeError(
            f"`{name}` must have dtype float32, float64, bfloat16 or float16, got {tensor.dtype}"
        )


def check_stored(name: str, tensor: Tensor, state: Tensor) -> None:
    """Raise unless `tensor` is on the state's device, in a dtype that mixes with the state's."""
    _check_beside(name, tensor, state, (torch.float64,) if _double(state) else STORED)


def check_gate(name: str, tensor: Tensor, state: Tensor) -> None:
    """Raise unless a value or gate is on the state's device, in float32 (float64 for float64)."""
    _check_beside(name, tensor, state, (torch.float64 if _double(state) else torch.float32,))


def _check_beside(
    name: str, tensor: Tensor, state: Tensor, allowed: tuple[torch.dtype, ...]
) -> None:
    if tensor.device != state.device:
        raise ValueError(f"`{name}` must be on {state.device}, got a tensor on {tensor.device}")
    check_dtype(name, tensor)
    if tensor.dtype not in allowed:
        raise TypeError(f"`{name}` must have dtype {_either(allowed)}, got {tensor.dtype}")


def _double(state: Tensor) -> bool:
    return state.dtype == torch.float64


def _either(dtypes: tuple[torch.dtype, ...]) -> str:
    return " or ".join(map(str, dtypes))


# --- numbers --------------------------------------------------------------------------------------


def check_count(name: str, number: Any) -> None:
    """Raise ValueError unless `number` is an integer ≥ 1."""
    options.check_count(name, number, kinds=(Integral, torch.SymInt))


def check_positive(name: str, number: Any, *, optional: bool = False, least: float = 0.0) -> None:
    """Raise ValueError unless `number` is positive, finite and ≥ `least`, or None if optional."""
    kinds = (float, Real, torch.SymFloat)
    options.check_positive(name, number, optional=optional, least=least, kinds=kinds)


# --- arguments of the operators -------------------------------------------------------------------


def _check_state(state: Tensor, *, over_time: bool = False) -> None:
    """Raise unless `state` is (…, d, m); with `over_time`, unless it is (…, T, d, m)."""
    shape = tuple(state.shape)
    if over_time and len(shape) < 3:
        raise ValueError(
            f"`state` must have shape (…, time, hidden_size, value_channels), got {shape}"
        )
    if len(shape) < 2 or 0 in shape[-2:]:
        raise ValueError(f"`state` must have shape (…, hidden_size, value_channels), got {shape}")
    check_dtype("state", state)


def rewrites_of(given: Any) -> tuple[int, ...]:
    """The axis (n,) that n rewrites have in direction, value and gate; () for a single one."""
    *batch, d, _ = given.state.shape
    return _rewrites("direction", given.direction, tuple(batch), (d,))


def next_rewrites_of(given: Any) -> tuple[int, ...]:
    """The axis (n,) in the weights and biases of a read's gates and values, and in these; or ()."""
    d, m = given.state.shape[-2:]
    if given.gate_weight is not None:
        return _rewrites("gate_weight", given.gate_weight, (), (d,))
    if given.value_weight is not None:
        return _rewrites("value_weight", given.value_weight, (), (m, d))
    return ()


def _rewrites(
    name: str, tensor: Tensor, batch: tuple[int, ...], last: tuple[int, ...]
) -> tuple[int, ...]:
    shape, at = tuple(tensor.shape), len(batch)
    if len(shape) != at + 1 + len(last) or shape[:at] != batch or shape[at + 1 :] != last:
        return ()  # a single rewrite, or a shape that does not fit it either
    if not 1 <= shape[at] <= MOST_REWRITES:
        raise ValueError(f"`{name}` must have 1 to {MOST_REWRITES} rewrites, got {shape[at]}")
    return (shape[at],)


def check_rewrite(given: Any) -> None:
    """Check the arguments of a rewrite; `given` has them by name."""
    state: Tensor = given.state
    if given.erase not in (0, 1):
        raise ValueError(f"`erase` must be 0 or 1, got {given.erase}")
    _check_state(state)
    *batch, d, m = state.shape
    n = rewrites_of(given)
    check_shape("direction", given.direction, (*batch, *n, d))
    check_stored("direction", given.direction, state)
    check_shape("value", given.value, (*batch, *n, m))
    check_gate("value", given.value, state)
    check_shape("gate", given.gate, (*batch, *n))
    check_gate("gate", given.gate, state)
    check_positive("eps_k", given.eps_k, least=LEAST_EPS_K)


def check_read(given: Any) -> None:
    """Check the arguments of a read; `given` has them by name."""
    state, compress = given.state, given.compress
    over_time = compress is not None and compress.ndim == 3
    _check_state(state, over_time=over_time)
    _check_compress(state, compress, over_time)
    d, m = state.shape[-2:]
    n = next_rewrites_of(given)
    for name, shape in (
        ("norm_weight", (d,)),
        ("gate_weight", (*n, d)),
        ("gate_bias", n),
        ("value_weight", (*n, m, d)),
        ("value_bias", (*n, m)),
    ):
        tensor = getattr(given, name)
        if tensor is not None:
            check_shape(name, tensor, shape)
            check_stored(name, tensor, state)
    for name in ("gate", "value"):
        bias, weight = getattr(given, f"{name}_bias"), getattr(given, f"{name}_weight")
        if bias is not None and weight is None:
            needed = f"`{name}_weight`"
            raise ValueError(f"`{name}_bias` must come with {needed}, got None for {needed}")
    check_positive("norm_eps", given.norm_eps, optional=True, least=LEAST_NORM_EPS)
    check_positive("value_scale", given.value_scale, optional=True)
    check_context_dtype(state, given.context_dtype)
    check_documents(given.document_starts, state.shape[:-2], state, over_time, "a read")


def check_chain(given: Any) -> None:
    """Raise unless a chain, which leads from an anchor to the state, comes with one."""
    if given.anchor is None and given.chain:
        raise ValueError(f"`chain` must come with an `anchor`, got {len(given.chain)} tensors")


def check_mask(name: str, mask: Any, batch: Sequence[Any], beside: Tensor) -> None:
    """Raise unless `mask` is a bool tensor of shape `batch` on the device of `beside`."""
    check_is_dense(name, mask)
    if mask.dtype != torch.bool:
        raise TypeError(f"`{name}` must have dtype torch.bool, got {mask.dtype}")
    check_shape(name, mask, batch)
    if mask.device != beside.device:
        raise ValueError(f"`{name}` must be on {beside.device}, got a tensor on {mask.device}")


def check_documents(
    starts: Any, batch: Sequence[Any], beside: Tensor, over_time: bool, what: str
) -> None:
    """Check which of the tokens of `beside`, whose leading shape is `batch`, start a document."""
    if starts is None:
        return
    if not over_time:
        text = f"`document_starts` must be left out for {what} within a token, got a tensor"
        raise ValueError(text)
    check_mask("document_starts", starts, batch, beside)


def check_pending(given: Any) -> None:
    """Check what earlier tokens left for a cached read; the rest of `given` is checked."""
    state, compress, pending = given.state, given.compress, given.pending
    taps = compress.shape[2] if compress is not None and compress.ndim == 3 else 1
    if pending is not None and taps == 1:
        text = "`pending` must be left out for a read within a token, got a tensor"
        raise ValueError(text)
    if pending is not None:
        check_shape("pending", pending, (*state.shape[:-3], taps - 1, state.shape[-2]))
        check_gate("pending", pending, state)
    if taps > 1 and state.shape[-3] == 0 and 0 not in state.shape[:-3]:
        got = tuple(state.shape)
        raise ValueError(f"`state` must have shape with at least one token, got {got}")


def _check_compress(state: Tensor, compress: Tensor | None, over_time: bool) -> None:
    d, m = state.shape[-2:]
    if compress is None:
        if m != 1:
            raise ValueError(
                f"`compress` must be a weight of shape ({d}, {m}) or ({d}, {m}, K) "
                f"for {m} value channels, got None"
            )
        return
    taps = compress.shape[2:] if over_time else ()
    if 0 in taps:
        raise ValueError("`compress` must have at least one tap, got 0")
    check_shape("compress", compress, (d, m, *taps))
    check_stored("compress", compress, state)


def check_context_dtype(state: Tensor, dtype: Any) -> None:
    """Raise TypeError unless `dtype` is None or a context of this state can have it."""
    allowed = (torch.float64,) if _double(state) else STORED
    if dtype is not None and dtype not in allowed:
        raise TypeError(f"`context_dtype` must be {_either(allowed)}, got {dtype!r}")


def check_expand(given: Any) -> None:
    """Check the arguments of an expansion; `given` has them by name."""
    x, weight, m = given.x, given.weight, given.value_channels
    check_count("value_channels", m)
    needed = 1 if weight is None else 2
    if x.ndim < needed or x.shape[-1] == 0:
        expected = "(…, hidden_size)" if weight is None else "(…, time, hidden_size)"
        raise ValueError(f"`x` must have shape {expected}, got {tuple(x.shape)}")
    check_dtype("x", x)
    over_time = weight is not None
    check_documents(given.document_starts, x.shape[:-1], x, over_time, "an expansion")
    if weight is None:
        return
    d = x.shape[-1]
    if weight.ndim != 3 or weight.shape[2] == 0:
        got = tuple(weight.shape)
        raise ValueError(f"`weight` must have shape ({d}, {m}, K) with K ≥ 1, got {got}")
    check_shape("weight", weight, (d, m, weight.shape[2]))
    check_stored("weight", weight, x)


def check_before(given: Any) -> None:
    """Check what earlier tokens left for a cached expansion; the rest of `given` is checked."""
    x, before = given.x, given.before
    taps = 1 if given.weight is None else given.weight.shape[2]
    if before is not None and taps == 1:
        text = "`before` must be left out for an expansion within a token, got a tensor"
        raise ValueError(text)
    if before is not None:
        check_shape("before", before, (*x.shape[:-2], taps - 1, x.shape[-1]))
        _check_beside("before", before, x, (x.dtype,))
    if taps > 1 and x.shape[-2] == 0 and 0 not in x.shape[:-2]:
        raise ValueError(f"`x` must have shape with at least one token, got {tuple(x.shape)}")
