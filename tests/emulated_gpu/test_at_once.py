"""Threads that use kernels of the emulated GPU for the first time at once."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from ddl import _native, functional
from tests.emulator.build import build
from tests.support.at_once import at_once
from tests.support.emulated_device import needs_emulator

pytestmark = needs_emulator

THREADS = 8


def gradients(d: int) -> list[Tensor]:
    r = torch.Generator().manual_seed(d)
    x, weight = (torch.randn(*s, generator=r).requires_grad_() for s in ((5, d), (d, 2, 2)))
    state = functional.expand(x, weight, value_channels=2)
    return [state.detach(), *torch.autograd.grad(state.tanh().sum(), (x, weight))]


@contextmanager
def counted() -> Iterator[Counter[tuple[str, ...]]]:
    """Run CPU tensors on a new emulated GPU, and count the kernels that are built for it."""
    built: Counter[tuple[str, ...]] = Counter()
    lock = threading.Lock()

    def builder(source: str, defines: Sequence[str]) -> str:
        with lock:
            built[(source, *defines)] += 1
        return str(build(source, defines))

    _native.emulate(builder)
    try:
        yield built
    finally:
        _native.emulate(None)


def test_each_kernel_is_built_once() -> None:
    """Every thread gets its results from it, also where the builder is in another thread."""
    sizes = [16, 24] * (THREADS // 2)
    with counted() as alone:
        expected = {d: gradients(d) for d in set(sizes)}
    with counted() as built:
        found = at_once(lambda index: gradients(sizes[index]), THREADS)
    assert len(built) >= 4, "kernels of two sizes"
    assert built == alone
    for d, results in zip(sizes, found, strict=True):
        assert all(map(torch.equal, results, expected[d]))


def test_a_kernel_that_is_not_built_is_every_callers_failure() -> None:
    def builder(source: str, defines: Sequence[str]) -> str:
        raise LookupError(f"no compiler in {threading.get_ident()}")

    def call(_: int) -> bool:
        try:
            gradients(16)
        except LookupError as error:
            return str(error) == f"no compiler in {threading.get_ident()}"
        return False

    _native.emulate(builder)
    try:
        assert all(at_once(call, THREADS))
    finally:
        _native.emulate(None)
