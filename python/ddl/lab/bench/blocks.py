"""`ddl bench blocks`: attention and MLP with each residual, against the additive one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from ddl.models import GPT

from .agreement import TOLERANCE, check, check_drift, drift, make
from .clock import Clock
from .measure import MismatchError
from .oracle import exact
from .row import Row, Stages, time_stages
from .setting import Setting


def rows(setting: Setting, clock: Clock) -> Iterator[Row]:
    """Two rows, forward and backward, for the block of each residual."""
    shape = (setting.batch, setting.time, setting.hidden_size)
    x = torch.randn(shape, generator=torch.Generator().manual_seed(2)).to(clock.device)
    found: dict[str, list[Row]] = {}
    timed: dict[str, Stages] = {}
    for residual in ("additive", *setting.residuals):
        model = make(setting.model(residual, layers=1), clock.device)
        found[residual] = [
            Row("blocks", f"{residual} {half}", "additive") for half in ("forward", "backward")
        ]
        try:
            worst = check_block(model, x, setting)
        except MismatchError as difference:
            mark(found[residual], f"{residual}: {difference}")
            continue
        for row in found[residual]:
            row.worst = worst
        timed[residual] = stages(model, x, setting)
    taken = time_stages(timed, clock, setting.repeats, "blocks")
    yield from against_additive(found, taken)


def block(model: GPT, x: Tensor) -> Tensor:
    """Contexts (B, T, d) of embeddings x (B, T, d): the model without embedding and head."""
    return model.hidden_states(x)


def computed(model: GPT, x: Tensor) -> dict[str, Tensor]:
    """The block's result and the gradients of x and of every parameter, by name."""
    leaf = x.detach().clone().requires_grad_()
    names, parameters = zip(*model.trunk.named_parameters(), strict=True)
    h = block(model, leaf)
    given = torch.randn(h.shape, generator=torch.Generator().manual_seed(3)).to(h)
    grads = torch.autograd.grad(h, [leaf, *parameters], given)
    return {"h": h.detach(), **dict(zip(("x", *names), grads, strict=True))}


def check_block(model: GPT, x: Tensor, setting: Setting) -> float:
    """Compare with the reference in float64; return the largest error, 1 being what is allowed.

    Under autocast the gradients must also stay near the reference's. Raises MismatchError.
    """
    expected = computed(exact(model), x.double())
    worst = check(computed(model, x), expected) / TOLERANCE
    if setting.dtype == "bfloat16":
        with setting.autocast(x.device):
            rounded = computed(model, x)
        check_drift(drift({**rounded}, expected))
    return worst


def stages(model: GPT, x: Tensor, setting: Setting) -> Stages:
    """The forward of a block, and its backward to x and to the parameters."""
    leaf = x.detach().clone().requires_grad_()
    wanted = [leaf, *model.trunk.parameters()]
    with torch.no_grad(), setting.autocast(x.device):
        given = torch.ones_like(block(model, leaf))
    made: list[Tensor] = []

    def forward() -> None:
        with setting.autocast(x.device):
            made.append(block(model, leaf))

    def backward() -> Any:
        return torch.autograd.grad(made.pop(), wanted, given)

    return [forward, backward]


def mark(rows: list[Row], red: str) -> None:
    """Refuse times to these rows."""
    for row in rows:
        row.red = red


def against_additive(
    found: dict[str, list[Row]], taken: dict[str, list[tuple[float, ...]]], first: int = 1
) -> Iterator[Row]:
    """The rows of all residuals but the additive one, with their times and its times.

    found: rows by residual, one for each stage from `first` on. taken: seconds of the stages.
    """
    base = found.pop("additive")
    for residual, rows in found.items():
        for at, (row, additive) in enumerate(zip(rows, base, strict=True), start=first):
            row.red = row.red or additive.red
            if row.red is None:
                row.seconds = [times[at] for times in taken[residual]]
                row.baseline_seconds = [times[at] for times in taken["additive"]]
            yield row
