"""Instructions of each operator per token: the slope between two numbers of tokens.

Run as a program it is the traced process.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ddl import functional
from tests.costs.tracer import BEGIN, END, Tracer, allow_tracing
from tests.support import ROOT
from tests.support.op_cases import BF16, F32, inputs, parameters

D, WIDE, M, TAPS = 64, 384, 4, 2
TOKENS = (1, 2)  # few, because steps are slow
VECTORS = "avx2"  # the same on every machine
DIRECTIONS = ("forward", "backward")


def rewrite_read(dtype: torch.dtype, compress: str, tokens: int, d: int = D) -> dict[str, Tensor]:
    return stored(inputs((tokens,), d, M) | parameters(d, M, compress, TAPS), dtype)


def stored(tensors: dict[str, Tensor | None], dtype: torch.dtype) -> dict[str, Tensor]:
    kept = {n: F32 if n in ("value", "gate") else dtype for n in tensors}
    return {n: t.to(kept[n]).requires_grad_() for n, t in tensors.items() if t is not None}


def expand(tokens: int) -> dict[str, Tensor]:
    return stored({"x": torch.randn(tokens, D), "weight": torch.randn(D, M, TAPS)}, F32)


# name → (function, its tensors for a number of tokens, its options)
CASES: dict[str, tuple[str, Callable[[int], dict[str, Tensor]], dict[str, object]]] = {
    "rewrite": ("rewrite", lambda n: stored(inputs((n,), D, M), F32), {"eps_k": 0.1}),
    "read": ("read", lambda n: without_rewrite(rewrite_read(F32, "channel", n)), {}),
    "rewrite_read": ("rewrite_read", lambda n: rewrite_read(F32, "channel", n), {"eps_k": 0.1}),
    "rewrite, nothing erased": (
        "rewrite", lambda n: stored(inputs((n,), D, M), F32), {"eps_k": 0.1, "erase": "none"}
    ),
    "rewrite_read, nothing erased": (
        "rewrite_read",
        lambda n: rewrite_read(F32, "channel", n),
        {"eps_k": 0.1, "erase": "none"},
    ),
    "rewrite_read, d 384": (
        "rewrite_read", lambda n: rewrite_read(F32, "channel", n, WIDE), {"eps_k": 0.1}
    ),
    "rewrite_read over time": (
        "rewrite_read", lambda n: rewrite_read(F32, "token", n), {"eps_k": 0.1}
    ),
    "rewrite_read in bfloat16": (
        "rewrite_read", lambda n: rewrite_read(BF16, "channel", n), {"eps_k": 0.1}
    ),
    "expand": ("expand", expand, {"value_channels": M}),
}  # fmt: skip


def without_rewrite(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {n: t for n, t in tensors.items() if n not in ("direction", "value", "gate")}


def per_token(names: Sequence[str]) -> dict[str, float]:
    """Return instructions per token by "case, direction", of the extension alone."""
    settings = {"DDL_SIMD": VECTORS, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    program = [sys.executable, "-m", "tests.costs.instructions", *names]
    counts = iter(Tracer(program, "_native", os.environ | settings).counts())
    slopes = {}
    for name in names:
        few, many = ({way: next(counts) for way in DIRECTIONS} for _ in TOKENS)
        for way in DIRECTIONS:
            slopes[f"{name}, {way}"] = (many[way] - few[way]) / (TOKENS[1] - TOKENS[0])
    return slopes


def trace(names: Sequence[str]) -> None:
    """In the traced process: run the cases, with marks around each operator."""
    torch.set_num_threads(1)
    allow_tracing()
    for name in names:
        for tokens in TOKENS:
            torch.manual_seed(0)
            for marked in (False, True):  # the first call loads and compiles things
                run(name, tokens, marked)


def run(name: str, tokens: int, marked: bool) -> None:
    operator, make, options = CASES[name]
    tensors = make(tokens)
    mark(marked, BEGIN)
    outputs = getattr(functional, operator)(**tensors, **options)
    mark(marked, END)
    outputs = [outputs] if isinstance(outputs, Tensor) else list(outputs)
    outputs = [output for output in outputs if output is not None]
    incoming = [torch.randn_like(output) for output in outputs]
    mark(marked, BEGIN)
    torch.autograd.grad(outputs, list(tensors.values()), incoming)
    mark(marked, END)


def mark(marked: bool, signum: signal.Signals) -> None:
    if marked:
        os.kill(os.getpid(), signum)


if __name__ == "__main__":
    trace(sys.argv[1:])
