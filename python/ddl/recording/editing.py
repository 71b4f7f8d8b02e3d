"""`ddl.edit`: set gates and values of chosen rewrites, or let them erase nothing."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from ddl.nn.hooks import Hook, Rewrite, installed
from ddl.nn.padding import without_padding
from ddl.nn.residual import DeltaResidual
from ddl.options import check_choice, is_whole

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
    erase: Literal["none"] | None = None,
) -> Iterator[None]:
    """Set the gate β or the value v of chosen rewrites, or erase nothing, while `model` runs.

        with ddl.edit(model, sublayers=3, tokens=slice(4, 9), beta=0.0):
            logits = model(idx).logits  # sublayer 3 writes nothing into tokens 4 to 8

    β = 0 keeps a finite state bit for bit; 1 replaces the readout by the value; 2 reflects the
    readout about the value. With erase="none" the chosen sublayers only write, X' = X + β k̂ vᵀ.

    To exchange values between two texts, record them with
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
        erase: "none", for all tokens and all rewrites of a sublayer; None to leave it.

    Raises:
        TypeError, ValueError: an argument does not fit, or none of `beta`, `value` and `erase` is
            given. Conditions on the tokens are checked when the model runs.
    """
    residuals = find_residuals(model)
    chosen = _choose(residuals, sublayers)
    if beta is None and value is None and erase is None:
        raise ValueError("`beta`, `value` or `erase` must be given, got None for all")
    check_choice("erase", erase, ("none",), optional=True)
    if erase is not None and tokens is not None:
        raise ValueError("`tokens` must be None with `erase`, got positions")
    if erase is not None and any(len(some) < each.rewrites for each, some in chosen.items()):
        expected = "name whole sublayers with `erase`"
        raise ValueError(f"`sublayers` must {expected}, got some of a sublayer's rewrites")
    new = _New(
        None if beta is None else _gates(beta),
        None if value is None else _numbers("value", value),
        erase,
    )
    at = _positions(tokens)

    def hook(rewrites: set[int]) -> Hook:
        return lambda rewrite: _edited(rewrite, rewrites, at, new)

    with installed((residual, hook(rewrites)) for residual, rewrites in chosen.items()):
        yield


class _New(NamedTuple):
    """The new gate, value and `erase`; None leaves the old ones."""

    beta: Tensor | None
    value: Tensor | None
    erase: str | None


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


def _gates(beta: Any) -> Tensor:
    """A gate as a tensor of numbers in [0, 2]."""
    gates = _numbers("beta", beta)
    values = gates.detach()
    if not bool(((values >= 0) & (values <= 2)).all()):  # NaN fails, too
        got = _outside(values) if values.ndim == 0 else f"a tensor with {_outside(values)}"
        raise ValueError(f"`beta` must be in [0, 2], got {got}")
    return gates


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


def _edited(rewrite: Rewrite, which: set[int], at: slice | Tensor | None, new: _New) -> Rewrite:
    if new.erase is not None:
        rewrite = rewrite._replace(erase=new.erase)
    if rewrite.is_single:
        return _edited_single(rewrite, at, new)
    values, gates = list(rewrite.value.unbind(-2)), list(rewrite.gate.unbind(-1))
    for j in which:
        single = rewrite._replace(value=values[j], gate=gates[j])
        edited = _edited_single(single, at, new)
        values[j], gates[j] = edited.value, edited.gate
    return rewrite._replace(value=torch.stack(values, -2), gate=torch.stack(gates, -1))


def _edited_single(rewrite: Rewrite, at: slice | Tensor | None, new: _New) -> Rewrite:
    if at is not None and rewrite.continues:
        raise ValueError("`tokens` must be None while a cache is used, got positions")
    mask = None if at is None else _mask(at, rewrite.gate)
    if new.beta is not None:
        gate = _replaced("beta", rewrite.gate, new.beta.to(rewrite.gate), mask)
        rewrite = rewrite._replace(gate=gate)
    if new.value is not None:
        values = new.value.to(rewrite.value)
        inside = None if mask is None else mask.unsqueeze(-1)
        rewrite = rewrite._replace(value=_replaced("value", rewrite.value, values, inside))
    if rewrite.keep is not None:  # padding stays unwritten
        rewrite = rewrite._replace(gate=without_padding(rewrite.gate, rewrite.keep))
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
