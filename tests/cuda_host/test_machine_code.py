"""The kernels' machine code: the width of stores, and when it waits for loads."""

from __future__ import annotations

import re

import pytest
import torch

from ddl.cuda import Kernel
from tests.cuda_host.test_compile import _own_cache as _own_cache
from tests.cuda_host.test_compile import compiled, macros, tensors
from tests.cuda_host.test_compile import pytestmark as linux
from tests.support.machine_code import (
    Instruction,
    loads,
    longest_loop,
    machine_code,
    needs_nvdisasm,
)
from tests.support.op_cases import BF16, F32

pytestmark = [linux, needs_nvdisasm]
Case = tuple[int, int, str, torch.dtype]


def loop_of(name: str, case: Case) -> tuple[Kernel, list[Instruction]]:
    """Compile a rewrite_read without biases; return one of its kernels and that kernel's loop."""
    d, m, compress, stored = case
    given = tensors(d, m, compress, stored, F32) | dict.fromkeys(("gate_bias", "value_bias"))
    kernels = compiled("sm_90", "rewrite_read", **given, eps_k=0.1)
    (kernel,) = [kernel for kernel in kernels if kernel.name == name]
    return kernel, longest_loop(machine_code(kernel))


def narrow_neighbours(code: list[Instruction]) -> list[str]:
    """Return the addresses of stores of four bytes that lie beside one another."""
    places = set[tuple[int, int]]()  # register of the address, offset
    found = []
    for each in code:
        store = re.search(r"\[R(\d+)\.64(?:\+(-?0x[0-9a-f]+))?\]", each.operands)
        if store and re.fullmatch(r"STG\.E(\.EF)?", each.opcode):
            base, offset = int(store[1]), int(store[2] or "0", 16)
            if {(base, offset - 4), (base, offset + 4)} & places:
                found.append(each.operands)
            places.add((base, offset))
        elif not each.opcode.startswith("ST"):
            places = {
                (base, at) for base, at in places if not {base, base + 1} & set(each.writes())
            }
    return found


@pytest.mark.table(0)
@pytest.mark.parametrize("stored", [BF16, F32], ids=str)
@pytest.mark.parametrize("d", [64, 384, 768, 2048, 4096])
def test_a_backward_stores_packets_whole(d, stored):
    """With one value channel packets are longest, and no two scalars of a token are neighbours."""
    _, loop = loop_of("rewrite_read_bwd", (d, 1, "identity", stored))
    assert any(each.opcode.startswith("STG.E.128") for each in loop)
    assert narrow_neighbours(loop) == []


def most_in_flight(code: list[Instruction]) -> int:
    """Return the most loads that are under way before one of them is waited for."""
    most, scoreboards = 0, list[int]()
    for each in code:
        if each.waits & set(scoreboards):
            scoreboards.clear()
        if each.opcode.startswith("LDG.") and each.sets is not None:
            scoreboards.append(each.sets)
            most = max(most, len(scoreboards))
    return most


@pytest.mark.table(0)
@pytest.mark.parametrize("case", [
    (64, 1, "identity", BF16), (768, 1, "identity", BF16), (768, 4, "token", BF16),
    (4096, 4, "channel", F32),
], ids=str)  # fmt: skip
def test_reduce_has_many_rows_in_flight(case):
    _, loop = loop_of("reduce", case)
    assert most_in_flight(loop) >= 32


# Cases whose plans load the next token ahead.
AHEAD = [(768, 1, "token", F32), (768, 1, "token", BF16), (4096, 4, "token", BF16)]


@pytest.mark.table(0)
@pytest.mark.parametrize("case", AHEAD, ids=str)
def test_a_forward_does_not_wait_for_the_next_token_before_its_second_sum(case):
    kernel, loop = loop_of("rewrite_read_fwd", case)
    assert int(macros(kernel)["LOAD_AHEAD"]) > 0
    streaming = loads(loop, "EF")
    assert streaming
    for first in streaming:
        rest = loop[first + 1 :]
        waits = (n for n, each in enumerate(rest) if loop[first].sets in each.waits)
        before = rest[: next(waits, len(rest))]
        assert any(each.is_barrier() for each in before), loop[first]


@pytest.mark.table(0)
@pytest.mark.parametrize("case", [(2048, 1, "identity", BF16), (768, 1, "token", BF16)], ids=str)
def test_a_forward_loads_gate_and_value_a_token_ahead(case):
    """Without biases they are the only numbers that are loaded without a hint."""
    kernel, loop = loop_of("rewrite_read_fwd", case)
    assert macros(kernel)["LOAD_AHEAD"] == "2"
    (load,) = loads(loop)
    assert sum(each.is_barrier() for each in loop[:load]) == 1, "between the two sums"


@pytest.mark.table(0)
@pytest.mark.parametrize("d", [768, 64, 384])
def test_a_tile_loads_gates_and_values_alone(d):
    """Parameters and the window stay in registers; two bulk copies bring X and k."""
    kernel, loop = loop_of("rewrite_read_fwd", (d, 4, "token", BF16))
    assert macros(kernel)["TILE"] == "4"
    assert kernel.spilled == 0
    assert loads(loop, "CONSTANT") == loads(loop, "EF") == []
    assert len(loads(loop)) == 5
    assert sum(each.opcode.startswith("UBLKCP") for each in loop) == 2
