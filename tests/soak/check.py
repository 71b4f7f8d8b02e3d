"""Solves a problem with the fused operators and holds it against the reference in float64."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from ddl import functional, reference
from tests.soak.problem import Problem
from tests.support.layouts import laid_out
from tests.support.op_cases import F64
from tests.support.poison import poisoned
from tests.support.tolerances import TOLERANCES, assert_close, errors

Named = dict[str, Tensor]


def check(problem: Problem) -> float:
    """Raise AssertionError, naming the tensor, if an output or a gradient is wrong.

    A tensor within the table of tolerances is right. One beyond it may be wrong by the table's
    bound times its condition number. Return the largest number that was needed, 1 if none.
    """
    before = {n: t.clone() for n, t in problem.tensors.items()}
    with poisoned(), threads(problem.threads):
        outputs, gradients = solve(functional, problem, problem.tensors, problem.wanted)
    for name, tensor in problem.tensors.items():
        assert torch.equal(tensor, before[name]), f"the call has written to {name}"
    with threads(1):
        exact = {n: t.double() for n, t in problem.tensors.items()}
        expected = by_label(*solve(reference, problem, exact, tuple(exact)))
    return compare(problem, by_label(outputs, gradients), expected)


def by_label(outputs: Named, gradients: Named) -> Named:
    return outputs | {f"gradient of {n}": t for n, t in gradients.items()}


def compare(problem: Problem, actual: Named, expected: Named) -> float:
    stored = problem.tensors["x" if problem.operator == "expand" else "state"].dtype
    worst = 1.0
    for label, tensor in actual.items():
        dtype = coarser(stored, tensor.dtype)
        options = {"gradient": label.startswith("gradient"), "scale": scale_of(label, expected)}
        try:
            assert_close(label, tensor, expected[label], dtype, **options)
        except AssertionError:
            condition = condition_number(problem, label, expected, dtype)
            if condition <= 1:
                raise
            assert_close(label, tensor, expected[label], dtype, depth=condition, **options)
            worst = max(worst, condition)
    return worst


def condition_number(problem: Problem, label: str, expected: Named, dtype: torch.dtype) -> float:
    """Return by how much a rounding of every argument grows on its way to a result.

    It is the largest of three trials with the arguments in float64, perturbed by at most u.
    """
    u, grown = TOLERANCES[dtype].u, 0.0
    generator = torch.Generator().manual_seed(0)
    for _ in range(3):
        perturbed = {
            n: t.double() * (1 + u * (2 * torch.rand(t.shape, generator=generator, dtype=F64) - 1))
            for n, t in problem.tensors.items()
        }
        moved = by_label(*solve(reference, problem, perturbed, tuple(perturbed)))[label]
        grown = max(grown, *errors(moved, expected[label], scale_of(label, expected)))
    return grown / u


def coarser(*dtypes: torch.dtype) -> torch.dtype:
    """Return the type with the largest rounding error."""
    return max(dtypes, key=lambda dtype: torch.finfo(dtype).eps)


def solve(module, problem: Problem, tensors: Named, wanted: tuple[str, ...]) -> tuple[Named, Named]:
    """Return outputs and wanted gradients by name; a gradient that autograd leaves out is zero."""
    leaves = {n: t.detach().requires_grad_(n in wanted) for n, t in tensors.items()}
    options = dict(problem.options)
    if module is reference:
        options.pop("context_dtype", None)
    results = getattr(module, problem.operator)(**leaves, **options)
    outputs = {"state": results} if isinstance(results, Tensor) else results._asdict()
    outputs = {n: t for n, t in outputs.items() if t is not None}
    reached = {n: outputs[n] for n in problem.used if outputs[n].requires_grad}
    if not reached:
        return outputs, {n: torch.zeros_like(leaves[n]) for n in wanted}
    given = [incoming(problem, n, t) for n, t in reached.items()]
    kept = [t.clone() for t in given]
    inputs = [leaves[n] for n in wanted]
    found = torch.autograd.grad(list(reached.values()), inputs, given, allow_unused=True)
    assert all(map(torch.equal, given, kept)), "the backward has written to a gradient it was given"
    filled = (
        torch.zeros_like(leaves[n]) if t is None else t for n, t in zip(wanted, found, strict=True)
    )
    return outputs, dict(zip(wanted, filled, strict=True))


def incoming(problem: Problem, name: str, output: Tensor) -> Tensor:
    """Return an output's gradient: the same numbers for every dtype of the output, bfloat16's."""
    generator = torch.Generator().manual_seed(zlib.crc32(f"{problem.seed} {name}".encode()))
    numbers = torch.randn(output.shape, generator=generator)
    return laid_out(numbers.bfloat16().to(output.dtype), problem.used[name])


def scale_of(label: str, expected: Named) -> float | None:
    """Return a bias gradient's scale, at least its weight's, because few elements may cancel."""
    sibling = label.removesuffix("bias") + "weight"
    if not label.endswith("bias") or sibling not in expected:
        return None
    return max(expected[n].square().mean().sqrt().item() for n in (label, sibling))


@contextmanager
def threads(number: int) -> Iterator[None]:
    kept = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(kept)
