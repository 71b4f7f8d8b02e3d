"""More than 2³¹ elements: only the last tokens of the tensors are ever touched.

Untouched pages take no memory, and the emulated GPU runs only each grid's last blocks.
"""

from __future__ import annotations

import functools
import re
import resource
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from ddl import functional, reference
from tests.emulated_gpu.test_mutants import in_a_child
from tests.emulator.build import KERNELS
from tests.support.emulated_device import emulated, needs_emulator
from tests.support.helpers import by_name
from tests.support.op_cases import BF16, F32, inputs, parameters
from tests.support.tolerances import assert_close

pytestmark = needs_emulator

MANY = 2**31
BLOCKS, CHUNK = 2, 7
WRITTEN = 64  # tokens at the end that are initialised
MULTIPROCESSORS = 65_536  # so that each chunk of an expansion has its own block
SEEN = CHUNK + 1  # of these, computed for any share of the last block
NEIGHBOURS = {"CHUNK": CHUNK, "ORDER": 0}
IN_TURNS = {
    "CHUNK": 2
}  # of an odd number of tokens the last is the second of the last block but one
PER_TOKEN = ("state", "direction", "value", "gate")


@pytest.fixture(autouse=True)
def _poisoned() -> None:
    """In place of the folder's fixture, which would fill gigabytes with NaN."""


@pytest.fixture(autouse=True)
def _the_end_alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    kernels = ("rewrite_read_fwd", "rewrite_read_bwd", "parameters_bwd", "reduce")
    kernels += ("expand_fwd", "expand_bwd")
    last = " ".join(f"{kernel}={BLOCKS}" for kernel in kernels)
    monkeypatch.setenv("DDL_EMULATOR_LAST_BLOCKS", last)
    with emulated(plan=NEIGHBOURS, multiprocessors=MULTIPROCESSORS):
        yield


def at_the_end(numbers: Tensor, tokens: int) -> Tensor:
    """A tensor (1, tokens, …) with these as its last tokens; the others are uninitialised."""
    large = torch.empty(1, tokens, *numbers.shape[2:], dtype=numbers.dtype)
    large[:, -numbers.shape[1] :] = numbers
    return large


def resident() -> int:
    """Bytes of memory that this process has touched and keeps."""
    pages = Path("/proc/self/statm").read_text(encoding="ascii").split()[1]
    return int(pages) * resource.getpagesize()


def drawn(d: int, m: int, compress: str) -> dict[str, Tensor]:
    tensors = inputs((1, WRITTEN), d, m) | parameters(d, m, compress)
    return {
        n: t.to(F32 if n in ("value", "gate") else BF16)
        for n, t in tensors.items()
        if t is not None
    }


def check(d: int, m: int, compress: str, seen: int = SEEN) -> None:
    tokens, before = MANY // (d * m) + 5, resident()
    small = drawn(d, m, compress)
    large = {n: at_the_end(t, tokens) if n in PER_TOKEN else t for n, t in small.items()}
    assert large["state"].numel() > MANY
    exact = {n: t.double() for n, t in small.items()}
    runs = []
    for module, tensors in ((functional, large), (reference, exact)):
        leaves = {n: t.detach().requires_grad_() for n, t in tensors.items()}
        outputs = by_name(module.rewrite_read(**leaves, eps_k=0.1))
        generator = torch.Generator().manual_seed(1)
        given = []
        for t in outputs.values():
            end = torch.randn(t[:, -WRITTEN:].shape, generator=generator).to(BF16).to(t.dtype)
            given.append(at_the_end(end, t.shape[1]))
        # No parameter gradients: they would need the blocks that do not run.
        wanted = [leaves[n] for n in PER_TOKEN]
        gradients = torch.autograd.grad(list(outputs.values()), wanted, given)
        named = {f"gradient of {n}": t for n, t in zip(PER_TOKEN, gradients, strict=True)}
        runs.append({n: t[:, -seen:] for n, t in (outputs | named).items()})
    assert resident() - before < 2**29, "more than the ends of the tensors was touched"
    for name, expected in runs[1].items():
        assert_close(name, runs[0][name], expected, BF16, gradient=name.startswith("gradient"))


SIZES = [(4096, 4, "channel"), (1024, 4, "token"), (768, 1, "identity")]


@pytest.mark.table(0)
@pytest.mark.parametrize(("d", "m", "compress"), SIZES)
def test_more_than_two_to_the_31_elements(d: int, m: int, compress: str) -> None:
    check(d, m, compress)


@pytest.mark.table(0)
@pytest.mark.parametrize(("d", "m", "compress"), [SIZES[0], SIZES[2]])
def test_blocks_take_turns_over_more_than_two_to_the_31_elements(
    d: int, m: int, compress: str
) -> None:
    with emulated(plan=IN_TURNS, multiprocessors=MULTIPROCESSORS):
        check(d, m, compress, seen=1)


@pytest.mark.table(0)
@pytest.mark.parametrize("taps", [0, 4, 16])
def test_an_expansion_to_more_than_two_to_the_31_elements(taps: int) -> None:
    check_expand(taps)


def check_expand(taps: int) -> None:
    d, m = 4096, 8
    tokens = MANY // (d * m) + 5
    x = torch.randn(1, WRITTEN, d, generator=torch.Generator().manual_seed(2)).to(BF16)
    weight = torch.randn(d, m, taps).to(BF16) if taps else None
    incoming = torch.randn(1, WRITTEN, d, m).to(BF16)
    runs = []
    for module, wide in ((functional, BF16), (reference, torch.float64)):
        given = [x.to(wide), incoming.to(wide)]
        if module is functional:
            given = [at_the_end(t, tokens) for t in given]
        leaf = given[0].requires_grad_()
        state = module.expand(leaf, weight if weight is None else weight.to(wide), value_channels=m)
        (gradient,) = torch.autograd.grad(state, [leaf], given[1])
        runs.append([t[:, -SEEN:] for t in (state, gradient)])
    for name, actual, expected in zip(("state", "gradient of x"), *runs, strict=True):
        assert_close(name, actual, expected, BF16, gradient=name != "state")


@pytest.mark.table(0)
@pytest.mark.parametrize(
    "checked",
    [
        functools.partial(check, 4096, 4, "channel"),
        functools.partial(check_expand, 4),
        functools.partial(check_expand, 16),
    ],
    ids=["rewrite_read", "expand", "expand by tap"],
)
def test_tokens_counted_in_32_bits_do_not_pass(checked: Callable[[], None], tmp_path: Path) -> None:
    mutant = shutil.copytree(KERNELS, tmp_path / "kernels")
    for file in mutant.iterdir():
        text = file.read_text(encoding="utf-8")
        text = re.sub(r"long long (token|feature)\b", r"int \1", text)
        file.write_text(text, encoding="utf-8")
    with emulated(kernels=mutant, plan=NEIGHBOURS, multiprocessors=MULTIPROCESSORS):
        noticed = in_a_child(checked)
    assert noticed
    assert "did not compile" not in noticed
