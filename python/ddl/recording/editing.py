"""`ddl.edit`: set gates and values of chosen rewrites while a model runs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ddl.nn.hooks import Hook, Rewrite, installed
from ddl.nn.residual import DeltaResidual
from ddl.options import is_whole

from .sublayers import find_residuals

__all__ = ["edit"]

WHOLE = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
Places = slice | Sequence[int] | Tensor | int | None


@contextmanager
def edit(
    model: nn.Module,
    *,
    sublayers: str | int | Sequence[str | int] | None = None,
    tokens: Places = None,
    beta: float | Tensor | None = None,
    value: float | Sequence[float] | Tensor | None = None,
) -> Iterator[None]:
    """Set the gate β, the value v, or both, of some rewrites while `model` runs.

        with ddl.edit(model, sublayers=3, tokens=slice(4, 9), beta=0.0):
            logits = model(idx).logits  # sublayer 3 writes nothing into tokens 4 to 8

    With β = 0 the state stays as it is, bit for bit; 1 replaces the readout by the value; 2
    reflects the readout about the value. To exchange values between two texts, record them with
    `ddl.record(model, tokens=("value",))` and pass `recording.tokens("value")[sublayer]`. Gradients
    flow through what is not edited, and into tensors that are passed. Contexts can be nested: the
    inner one is applied last. A `ddl.record` inside sees the edited rewrites. Meanwhile compiled
    models run uncompiled.

    Args:
        model: as in `ddl.record`.
        sublayers: numbers, counted in the model's order from 0, or from the end if negative, or
            names as in `recording.sublayers`; None for all. Of several rewrites of a sublayer each
            has a number and a name of its own, and the name of the sublayer stands for all of them.
        tokens: positions along T: a number, several, a slice, or a bool mask (T,) or (B, T); None
            for all. While a model generates with a cache only None is possible.
        beta: in [0, 2]: a number, or a tensor that broadcasts to (B, T).
        value: a number for every value channel, m numbers, or a tensor that broadcasts to
            (B, T, m).

    Raises:
        TypeError, ValueError: an argument does not fit, or neither `beta` nor `value` is given.
            Conditions on the tokens are checked when the model runs.
    """
    residuals = find_residuals(model)
    chosen = _choose(residuals, sublayers)
    if beta is None and value is None:
        raise ValueError("`beta` or `value` must be given, got None for both")
    if beta is not None:
        beta = _numbers("beta", beta)
        _check_beta(beta)
    if value is not None:
        value = _numbers("value", value)
    at = _positions(tokens)

    def hook(rewrites: set[int]) -> Hook:
        return lambda rewrite: _edited(rewrite, rewrites, at, beta, value)

    with installed((residual, hook(rewrites)) for residual, rewrites in chosen.items()):
        yield


def _choose(residuals: dict[str, DeltaResidual], sublayers: Any) -> dict[DeltaResidual, set[int]]:
    """The chosen residuals, and which of their rewrites."""
    every = {name: (each, set(range(each.rewrites))) for name, each in residuals.items()}
    if sublayers is None:
        return dict(every.values())
    rows: dict[str, tuple[DeltaResidual, set[int]]] = {}
    for name, (residual, rewrites) in every.items():
        single = residual.rewrites == 1
        rows |= {name if single else f"{name}.{j}": (residual, {j}) for j in rewrites}
    names, known = list(rows), every | rows
    chosen: dict[DeltaResidual, set[int]] = {}
    several = isinstance(sublayers, Iterable) and not isinstance(sublayers, str)
    for which in sublayers if several else [sublayers]:
        if is_whole(which) and -len(names) <= which < len(names):
            which = names[which]
        if not isinstance(which, str) or which not in known:
            expected = f"below {len(names)} or among the names {', '.join(names)}"
            raise ValueError(f"`sublayers` must be {expected}, got {which!r}")
        residual, rewrites = known[which]
        chosen[residual] = chosen.get(residual, set()) | rewrites
    return chosen


def _numbers(name: str, given: Any) -> Tensor:
    """A number, numbers or a tensor as a tensor of floats: float64, unless it is a tensor."""
    kept = isinstance(given, Tensor)
    try:
        numbers = given if kept else torch.as_tensor(given, dtype=torch.float64)
    except (TypeError, ValueError, RuntimeError):
        numbers = None
    if numbers is None or numbers.is_complex() or numbers.is_meta:
        got = f"a tensor of {given.dtype} on {given.device}" if kept else repr(given)
        raise TypeError(f"`{name}` must be real numbers, got {got}")
    return numbers if numbers.is_floating_point() else numbers.float()


def _check_beta(beta: Tensor) -> None:
    values = beta.detach()
    if not bool(((values >= 0) & (values <= 2)).all()):  # NaN fails, too
        got = _outside(values) if values.ndim == 0 else f"a tensor with {_outside(values)}"
        raise ValueError(f"`beta` must be in [0, 2], got {got}")


def _outside(values: Tensor) -> float:
    wrong = ~((values >= 0) & (values <= 2))
    return float(values[wrong][0])


def _positions(tokens: Any) -> slice | Tensor | None:
    if tokens is None or isinstance(tokens, slice):
        return tokens
    try:
        at = torch.as_tensor(tokens)
    except (TypeError, ValueError, RuntimeError, OverflowError):
        at = torch.empty(())  # refused below
    if at.ndim == 1 and len(at) == 0:  # a search that found no token; torch takes [] for floats
        at = at.long()
    if at.is_meta or (at.dtype != torch.bool and (at.dtype not in WHOLE or at.ndim > 1)):
        expected = "a number, several, a slice, or a bool mask (T,) or (B, T)"
        raise ValueError(f"`tokens` must be {expected}, got {tokens!r}")
    return at if at.dtype == torch.bool else at.long().reshape(-1)


def _edited(
    rewrite: Rewrite,
    which: set[int],
    at: slice | Tensor | None,
    beta: Tensor | None,
    value: Tensor | None,
) -> Rewrite:
    if rewrite.is_single:
        return _edited_single(rewrite, at, beta, value)
    values, gates = list(rewrite.value.unbind(-2)), list(rewrite.gate.unbind(-1))
    for j in which:
        single = rewrite.changed(value=values[j], gate=gates[j])
        edited = _edited_single(single, at, beta, value)
        values[j], gates[j] = edited.value, edited.gate
    return rewrite.changed(value=torch.stack(values, -2), gate=torch.stack(gates, -1))


def _edited_single(
    rewrite: Rewrite, at: slice | Tensor | None, beta: Tensor | None, value: Tensor | None
) -> Rewrite:
    if at is not None and rewrite.continues:
        raise ValueError("`tokens` must be None while a cache is used, got positions")
    mask = None if at is None else _mask(at, rewrite.gate)
    if beta is not None:
        gate = beta.to(rewrite.gate)
        rewrite = rewrite.changed(gate=_replaced("beta", rewrite.gate, gate, mask))
    if value is not None:
        given = value.to(rewrite.value)
        inside = None if mask is None else mask.unsqueeze(-1)
        rewrite = rewrite.changed(value=_replaced("value", rewrite.value, given, inside))
    if rewrite.keep is not None:  # padding stays unwritten
        rewrite = rewrite.changed(gate=rewrite.gate * rewrite.keep)
    return rewrite


def _mask(at: slice | Tensor, gate: Tensor) -> Tensor:
    """The chosen tokens as a bool mask that broadcasts to gate (…, T)."""
    length = gate.shape[-1] if gate.ndim else 0
    if isinstance(at, slice):
        mask = torch.zeros(length, dtype=torch.bool)
        mask[list(range(length)[at])] = True  # of a negative step, too
    elif at.dtype == torch.bool:
        mask = at
        if gate.ndim == 0 or mask.ndim == 0 or mask.shape != gate.shape[-mask.ndim :]:
            expected = f"a mask of shape {tuple(gate.shape)} or ({length},)"
            raise ValueError(f"`tokens` must be {expected}, got {tuple(mask.shape)}")
    else:
        wrong = [int(i) for i in at if not -length <= int(i) < length]
        if wrong:
            raise ValueError(f"`tokens` must be positions in {length} tokens, got {wrong[0]}")
        mask = torch.zeros(length, dtype=torch.bool)
        mask[at] = True
    return mask.to(gate.device)


def _replaced(name: str, old: Tensor, new: Tensor, mask: Tensor | None) -> Tensor:
    """`new`, broadcast to the shape of `old`, where the mask is set."""
    try:
        new = new.expand(old.shape)
    except RuntimeError:
        expected = f"a shape that broadcasts to {tuple(old.shape)}"
        raise ValueError(f"`{name}` must have {expected}, got {tuple(new.shape)}") from None
    return new.contiguous() if mask is None else torch.where(mask, new, old)
