"""Draws problem number i of a seed: an operator, its arguments, and what is asked of it."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tests.support.layouts import LAYOUTS, laid_out
from tests.support.op_cases import BF16, F16, F32, F64, inputs, parameters

OPERATORS = ("rewrite", "read", "rewrite_read", "rewrite_read", "expand")  # the largest one twice
OUTPUTS = {
    "rewrite": ("state",),
    "read": ("context", "value", "gate"),
    "rewrite_read": ("state", "context", "value", "gate"),
    "expand": ("state",),
}
HIDDEN = (*range(1, 10), 15, 16, 17, 31, 32, 33, 63, 64, 65, 96, 100, 127, 128, 200, 384, 768, 1000)
CHANNELS = (1, 1, 2, 3, 4, 4, 4, 5, 7, 8, 9, 16, 17)
TAPS = (1, 2, 3, 4, 4, 4, 5, 8, 13)
ELEMENTS = (300, 3_000, 3_000, 30_000, 100_000)  # of a state; from 16,384 on threads are used
THREADS = (1, 1, 2, 3, 5)
# of a state; a sigmoid of logits that are not normalised would be saturated by a large one
SCALES = (1.0, 1.0, 0.03, 30.0)
SMALL = 16  # with fewer features k̂ and x̂ hardly vary, and their gradients cancel unless ε is one


@dataclass(frozen=True)
class Problem:
    """Arguments of one call of `ddl.functional`, and of its backward."""

    operator: str
    tensors: dict[str, Tensor]
    options: dict[str, Any]
    wanted: tuple[str, ...]  # tensors whose gradients are asked for
    used: dict[str, str]  # output that has a gradient → its layout
    threads: int
    seed: str  # of the incoming gradients

    def __str__(self) -> str:
        tensors = ", ".join(
            f"{n} {str(t.dtype).removeprefix('torch.')} {tuple(t.shape)}"
            f"{'' if t.is_contiguous() else f' strides {t.stride()}'}"
            for n, t in self.tensors.items()
        )
        asked = f"gradients of {', '.join(self.wanted) or 'nothing'} through {self.used}"
        return f"{self.operator}({tensors}, {self.options}), {asked}, {self.threads} threads"


def draw(seed: int, index: int) -> Problem:
    """Return problem `index` of `seed`: always the same, whichever were drawn before."""
    rng = random.Random(f"{seed}/{index}")
    torch.manual_seed(rng.randrange(2**62))
    operator = rng.choice(OPERATORS)
    d, m = rng.choice(HIDDEN), rng.choice(CHANNELS)
    compress = rng.choice(["channel", "token", "token", *(["identity"] * 3 if m == 1 else [])])
    over_time = compress == "token" and operator != "rewrite"
    batch, taps = draw_batch(rng, d * m, least=int(over_time)), rng.choice(TAPS)
    if operator == "expand":
        tensors = {"x": torch.randn(*batch, d, dtype=F64)}
        if over_time:
            tensors["weight"] = torch.randn(d, m, taps, dtype=F64) / taps
        options: dict[str, Any] = {"value_channels": m}
    else:
        tensors, options = draw_rewrite_read(
            rng, operator, batch, d=d, m=m, compress=compress, taps=taps
        )
    given = {n: draw_layout(rng, t) for n, t in draw_dtypes(rng, tensors, options).items()}
    return Problem(
        operator,
        given,
        options,
        wanted=tuple(n for n in given if rng.random() < 0.8) if rng.random() < 0.9 else (),
        used=draw_used(rng, operator, given),
        threads=rng.choice(THREADS),
        seed=f"{seed}/{index}",
    )


def draw_batch(rng: random.Random, width: int, least: int) -> tuple[int, ...]:
    """Draw zero to three axes, at least `least`, of a state with `width` elements a token."""
    axes = max(least, rng.choice([0, 1, 2, 2, 2, 3]))
    left = max(1, rng.choice(ELEMENTS) // width)
    sizes = []
    for _ in range(axes):
        size = rng.randint(1, left) if rng.random() < 0.6 else left
        sizes.append(0 if rng.random() < 0.01 else size)
        left = max(1, left // max(size, 1))
    rng.shuffle(sizes)
    return tuple(sizes)


def draw_rewrite_read(
    rng: random.Random,
    operator: str,
    batch: tuple[int, ...],
    *,
    d: int,
    m: int,
    compress: str,
    taps: int,
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Draw the float64 tensors and the options of rewrite, read or rewrite_read."""
    tensors: dict[str, Tensor | None] = {}
    options: dict[str, Any] = {}
    rewrite = inputs(batch, d, m)
    if operator != "read":
        options["eps_k"] = 1.0 if d < SMALL else rng.choice([0.1, 1.0, 0.02 * math.sqrt(d)])
        rewrite["direction"] *= rng.choice([1.0, 1.0, 0.1, 10.0])
        if rng.random() < 0.1:
            rewrite["direction"].view(-1, d)[:1] = 0  # a projection that is still zero
    tensors |= rewrite if operator != "read" else {"state": rewrite["state"]}
    if operator == "rewrite":
        rewrite["state"] *= rng.choice(SCALES)
        return tensors, options
    tensors |= parameters(d, m, compress, taps)
    for group in (["norm_weight"], ["gate_bias"], ["value_bias"]):
        if rng.random() < 0.2:
            tensors |= dict.fromkeys(group)
    for group in (["gate_weight", "gate_bias"], ["value_weight", "value_bias"]):
        if rng.random() < 0.2:
            tensors |= dict.fromkeys(group)
    options["norm_eps"] = 1.0 if d < SMALL else rng.choice([1e-5, 1e-5, 1e-2, 1.0])
    if rng.random() < 0.2:
        options["norm_eps"] = None
    options["value_scale"] = rng.choice([None, None, 4.0])
    options["value_from"] = rng.choice(["context", "compressed"])
    saturates = options["norm_eps"] is None or options["value_from"] == "compressed"
    rewrite["state"] *= 1.0 if saturates else rng.choice(SCALES)
    return {n: t for n, t in tensors.items() if t is not None}, options


def draw_dtypes(
    rng: random.Random, tensors: dict[str, Tensor], options: dict[str, Any]
) -> dict[str, Tensor]:
    """Store the tensors: all in float64, or in any mix of the other types."""
    if rng.random() < 0.2:
        return tensors
    most = rng.choice([F32, BF16, F16])
    dtypes = {n: most if rng.random() < 0.7 else rng.choice([F32, BF16, F16]) for n in tensors}
    for n in {"value", "gate"} & tensors.keys():
        dtypes[n] = F32 if rng.random() < 0.7 else most
    if "value_from" in options:
        options["context_dtype"] = rng.choice([None, None, F32, BF16, F16])
    return {n: t.to(dtypes[n]) for n, t in tensors.items()}


def draw_layout(rng: random.Random, x: Tensor) -> Tensor:
    return laid_out(x, rng.choice(LAYOUTS)) if rng.random() < 0.3 else x


def draw_used(rng: random.Random, operator: str, tensors: dict[str, Tensor]) -> dict[str, str]:
    """Draw the outputs that get a gradient, at least one, and the layout of each gradient."""
    made = [n for n in OUTPUTS[operator] if n not in ("value", "gate") or f"{n}_weight" in tensors]
    used = [n for n in made if rng.random() < 0.7] or [rng.choice(made)]
    return {n: rng.choice(("packed", "packed", *LAYOUTS)) for n in used}
