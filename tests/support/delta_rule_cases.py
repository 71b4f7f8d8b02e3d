"""Problems of the delta rule over time in float64; the tests round them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ddl import functional, reference
from tests.support.op_cases import F32, F64
from tests.support.tolerances import assert_close

GATES = ("beta", "g", "initial_state")  # which stay float32 beside half precision
LEAVES = ("q", "k", "v", *GATES)
LOG_DECAYS = (-0.01, -1.0, -5.0, -11.0, -20.0, -50.0)  # from nearly none to nearly nothing left


class Layout(NamedTuple):
    """Heads of the states and of q, k and v, and the steps of a token (None: without an axis)."""

    H: int
    q: int
    k: int
    v: int
    n: int | None = None


LAYOUTS = {
    "single": Layout(1, 1, 1, 1),
    "alike": Layout(3, 3, 3, 3),
    "grouped": Layout(4, 2, 2, 4),
    "multi-value": Layout(3, 1, 1, 3),
    "multi-key": Layout(3, 1, 3, 1),
    "multi-KV": Layout(3, 1, 3, 3),
    "multi-query": Layout(1, 3, 1, 1),
    "queries to states": Layout(2, 4, 1, 2),
    "crossed": Layout(6, 2, 3, 6),  # no smaller family than all six states
    "one step": Layout(2, 2, 2, 2, 1),
    "steps": Layout(2, 2, 1, 2, 3),
    "steps, queries": Layout(2, 4, 2, 1, 2),
}


def problem(
    layout: str = "alike",
    *,
    B: int = 2,
    T: int = 7,
    K: int = 5,
    V: int = 3,
    g: str | None = "head",
    state: bool = True,
    documents: bool = False,
    seed: int = 0,
) -> dict[str, Any]:
    """float64 arguments with unit keys. β covers [0, 2], both ends included; g is in [−1, 0]."""
    r = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=r, dtype=F64)

    H, queries, keys, values, n = LAYOUTS[layout]
    each = () if n is None else (n,)
    k = normal(B, T, *each, keys, K)
    beta = 2 * torch.rand(B, T, *each, H, generator=r, dtype=F64)
    beta.flatten()[:2].copy_(torch.tensor([0.0, 2.0][: beta.numel()]))
    decays = (K,) if g == "feature" else ()
    starts = torch.rand(B, T, generator=r) < 0.2
    if T > 64:  # a document starts with a chunk, and one right after it
        starts[0, 64], starts[-1, 63] = True, True
    return {
        "q": normal(B, T, queries, K),
        "k": k / k.norm(dim=-1, keepdim=True),
        "v": normal(B, T, *each, values, V),
        "beta": beta,
        "g": None if g is None else -torch.rand(B, T, H, *decays, generator=r, dtype=F64),
        "initial_state": normal(B, H, K, V) if state else None,
        "document_starts": starts if documents else None,
    }


def rounded(given: dict[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    """The arguments in a dtype; gates and states in float32 beside half precision."""
    small = F64 if dtype == F64 else F32
    return {
        name: x.to(small if name in GATES else dtype)
        if isinstance(x, Tensor) and x.is_floating_point()
        else x
        for name, x in given.items()
    }


def results(
    call: Callable[..., Any],
    given: dict[str, Any],
    *,
    of: tuple[str, ...] = ("y", "final_state"),
    change: Callable[[str, Tensor], Tensor] = lambda _, cotangent: cotangent,
) -> dict[str, Tensor]:
    """Outputs by name, and the gradients of everything for random gradients of those in `of`.

    change: the gradients of the outputs, by the output's name, are replaced by what it returns.
    """
    leaves = {
        name: given[name].detach().requires_grad_()
        for name in LEAVES
        if given.get(name) is not None
    }
    found = call(**given | leaves)._asdict()
    r = torch.Generator().manual_seed(1)
    reached, cotangents = [], []
    for name, output in ((name, found[name]) for name in of):
        cotangent = torch.randn(output.shape, generator=r, dtype=F64).to(output.dtype)
        cotangent = change(name, cotangent)
        if output.requires_grad:  # the loop of the reference leaves an empty y without a gradient
            reached.append(output)
            cotangents.append(cotangent)
    if not reached:
        return found
    grads = torch.autograd.grad(
        reached, list(leaves.values()), cotangents, allow_unused=True, materialize_grads=True
    )
    return found | {f"gradient of {name}": grad for name, grad in zip(leaves, grads, strict=True)}


def check_mixed_decays(g: str) -> None:
    """Compare the gradient of decays from weak to strong, each relative to its own size."""
    r = torch.Generator().manual_seed(2)
    given = problem("alike", T=70, K=16, V=32, g=g)
    weakest, strongest = LOG_DECAYS[0], LOG_DECAYS[-1]  # even in the logarithm of g
    share = torch.rand(given["g"].shape, generator=r, dtype=F64)
    given = rounded(given | {"g": weakest * (strongest / weakest) ** share}, F32)
    actual = results(functional.delta_rule, given)["gradient of g"]
    expected = results(reference.delta_rule, rounded(given, F64))["gradient of g"]
    decay = given["g"].double().exp()
    assert_close("gradient of exp g", actual / decay, expected / decay, F32, gradient=True)
