"""Memory traffic of the rewrite_read kernels, in rows of d elements read and written.

It is counted on the emulated GPU with an H100's plan, and compared with the counts at the top of
the kernels' files. A row that is read again counts again, even if a cache would hold it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from ddl.ops import declarations
from ddl.ops.declarations import Operator
from tests.emulator.traffic import Traffic, traffic
from tests.support.emulated_device import emulated, needs_emulator
from tests.support.op_cases import BF16, F32, inputs, parameters

pytestmark = needs_emulator

TOKENS = 60
A100 = {"multiprocessors": 2, "shared_per_block": 227 << 10}  # with more shared memory
H100 = {**A100, "cluster": 8}  # a chunk of 30 tokens or more each
Rows = dict[str, float]


@pytest.fixture
def counted() -> Iterator[Traffic]:
    with traffic() as counted:
        yield counted


def call(operator: Operator, **given: Any) -> dict[str, Tensor]:
    """The outputs of an operator by name, without absent ones.

    Missing arguments are None or an empty list.
    """
    missing: dict[str, Any] = {
        name: [] if kind == "Tensor[]?" else None for name, kind in operator.kinds.items()
    }
    if "erase" in missing:
        missing["erase"] = 0
    arguments = operator.Arguments(**missing | given)
    with torch.no_grad():
        outputs = zip(operator.outputs, operator.call(*arguments), strict=True)
    return {name: output for name, output in outputs if output is not None}


def rows(
    counted: Traffic, d: int, m: int, compress: str, dtype: torch.dtype = BF16
) -> tuple[Rows, Rows]:
    """Rows per token of forward and backward, by tensor; a `+` marks writes."""
    row = TOKENS * d * dtype.itemsize

    def moved(**tensors: Tensor) -> Rows:
        found = {name: counted.bytes(tensor) for name, tensor in tensors.items()}
        counted.forget()
        reads = {name: read / row for name, (read, _) in found.items() if read}
        return reads | {
            f"+{name}": written / row for name, (_, written) in found.items() if written
        }

    drawn = inputs((1, TOKENS), d, m) | parameters(d, m, compress)
    given = {
        n: t.to(F32 if n in ("value", "gate") else dtype) for n, t in drawn.items() if t is not None
    } | {"eps_k": 0.1, "norm_eps": 1e-5, "value_from_compressed": False}
    stream = {"X": given["state"], "k": given["direction"]}

    saved = call(declarations.rewrite_read, **given, saves=True)
    new_state, context = saved.pop("new_state"), saved.pop("context")
    x = {"x": saved["compressed"]} if compress == "token" else {}
    forward = moved(**stream, **{"X'": new_state}, h=context, **x)

    backward = declarations.rewrite_read.backward
    incoming = {
        f"grad_{name}": torch.ones_like(output)
        for name, output in {"new_state": new_state, "context": context, **saved}.items()
        if f"grad_{name}" in backward.names
    }
    wanted = (1 << len(backward.outputs)) - 1
    grads = call(backward, **given, **saved, **incoming, wanted=wanted)
    passed = {"G": incoming["grad_new_state"], "dh": incoming["grad_context"], **x}
    made = {"dX": grads["grad_state"], "dk": grads["grad_direction"]}
    return forward, moved(**stream, **passed, **made)


def once(m: int, *, x: int = 0) -> tuple[Rows, Rows]:
    """The counts in the kernels' files; x: rows saved by a token read, 0 or 1."""
    forward = {"X": m, "k": 1, "+X'": m, "+h": 1} | ({"+x": 1} if x else {})
    backward = {"X": m, "G": m, "k": 1, "dh": 1, "+dX": m, "+dk": 1} | ({"x": 1} if x else {})
    return forward, backward


PLANS = [
    {"KEEP_IN_REGISTERS": keep, "STAGES": stages}
    for keep, stages in ((1, 0), (1, 1), (0, 1), (0, 2))
]


@pytest.mark.table(1)
@pytest.mark.parametrize("plan", PLANS, ids=str)
@pytest.mark.parametrize(("m", "compress"), [(1, "identity"), (4, "channel")])
@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_held_or_staged_every_row_crosses_memory_once(dtype, m, compress, plan, counted):
    with emulated(plan=plan, sanitizer="traffic", **H100):
        assert rows(counted, 256, m, compress, dtype) == once(m)


@pytest.mark.table(1)
@pytest.mark.parametrize("m", [1, 4, 8])
@pytest.mark.parametrize("d", [768, 1024, 2048, 4096, 8192])
def test_so_it_does_at_the_usual_sizes(d, m, counted):
    with emulated(sanitizer="traffic", **H100):
        assert rows(counted, d, m, "channel" if m > 1 else "identity") == once(m)


@pytest.mark.table(0)
@pytest.mark.parametrize("d", [1024, 768, 2048, 4096])
def test_a_token_read_moves_a_tenth_more_than_a_channel_read_at_most(d, counted):
    with emulated(sanitizer="traffic", **H100):
        moved = rows(counted, d, 4, "token")
    repeated = 3 / TOKENS  # the second of two chunks begins three tokens early
    for actual, expected in zip(moved, once(4, x=1), strict=True):
        assert actual.keys() == expected.keys()
        for name, count in expected.items():
            assert count <= actual[name] <= count * (1 + repeated), name
    channel = sum(sum(each.values()) for each in once(4))
    assert sum(sum(each.values()) for each in moved) <= 1.1 * channel


def test_without_clusters_what_a_block_has_no_room_for_is_read_again(counted):
    with emulated(sanitizer="traffic", **A100):
        forward, backward = rows(counted, 4096, 4, "channel")
        assert forward == once(4)[0]
        again = {"X": 8, "G": 4, "k": 2, "dh": 2, "+dX": 4, "+dk": 1}
        assert backward == again, "for parameters_bwd"
        forward, backward = rows(counted, 4096, 4, "token")
        assert (backward["X"], backward["G"], backward["k"]) == (8, 4, 2), (
            "again for parameters_bwd"
        )
        assert 2 <= backward["dh"] <= 2 * (1 + 3 / TOKENS)


def test_plain_loads_are_counted_too(counted):
    """X is read twice from memory and counts twice, so the counting can fail."""
    with emulated(plan={"KEEP_IN_REGISTERS": 0, "STAGES": 0}, sanitizer="traffic", **H100):
        forward, backward = rows(counted, 256, 4, "channel")
    assert (forward["X"], forward["k"]) == (8, 2)
    assert (backward["X"], backward["G"], backward["k"]) == (8, 8, 2)


def test_a_tensor_that_shares_a_line_is_not_counted(counted):
    numbers = torch.zeros(64)
    assert counted.bytes(numbers[16:32]) == (0, 0)
    for part in (numbers[1:17], numbers[:15]):
        with pytest.raises(ValueError, match=r"^`tensor` must begin and end at multiples of 64 b"):
            counted.bytes(part)
