"""Memory traffic of the rewrite_read kernels, in rows of d elements read and written.

It is counted on the emulated GPU with an H100's plan, and compared with the counts at the top of
the kernels' files. A row that is read again counts again, even if a cache would hold it.
"""

from __future__ import annotations

import types
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from ddl import functional
from ddl.ops import operators
from tests.emulator.traffic import Traffic, traffic
from tests.support.emulated_device import emulated, needs_emulator
from tests.support.op_cases import BF16, F32, inputs, parameters

pytestmark = needs_emulator

TOKENS = 60
A100 = {"multiprocessors": 2, "shared_per_block": 227 << 10}  # with more shared memory
H100 = {**A100, "cluster": 8}  # a chunk of 30 tokens or more each
Rows = dict[str, float]


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> Iterator[Traffic]:
    """Count the rows of the tensors passed to native code."""
    with traffic() as counted:
        native = operators._native

        def rewrite_read(state: Any, rewrite: Any, read: Any, outputs: Any, *rest: Any) -> None:
            new_state, _, context, _, _, compressed, _ = outputs
            counted.watch({"X": state, "k": rewrite[0]})
            counted.watch({"X'": new_state, "h": context, "x": compressed})
            native.rewrite_read(state, rewrite, read, outputs, *rest)

        def rewrite_read_backward(
            state: Any, rewrite: Any, read: Any, saved: Any, grads: Any, outputs: Any, *rest: Any
        ) -> None:
            counted.watch({"X": state, "k": rewrite[0], "x": saved[5], "G": grads[0]})
            counted.watch({"dh": grads[1], "dX": outputs[0], "dk": outputs[1]})
            native.rewrite_read_backward(state, rewrite, read, saved, grads, outputs, *rest)

        stand_in = types.SimpleNamespace(
            rewrite_read=rewrite_read, rewrite_read_backward=rewrite_read_backward
        )
        monkeypatch.setattr(operators, "_native", stand_in)
        yield counted


def rows(
    counted: Traffic, d: int, m: int, compress: str, dtype: torch.dtype = BF16
) -> tuple[Rows, Rows]:
    """Rows per token of forward and backward, by tensor; a `+` marks writes."""
    tensors = inputs((1, TOKENS), d, m) | parameters(d, m, compress)
    leaves = {
        n: t.to(F32 if n in ("value", "gate") else dtype).requires_grad_()
        for n, t in tensors.items()
        if t is not None
    }
    runs: list[Rows] = []

    def end() -> None:
        row = TOKENS * d * dtype.itemsize
        moved = counted.bytes()
        read = {n: bytes_read / row for n, (bytes_read, _) in moved.items() if bytes_read}
        written = {
            f"+{n}": bytes_written / row for n, (_, bytes_written) in moved.items() if bytes_written
        }
        runs.append(read | written)
        counted.forget()

    outputs = functional.rewrite_read(**leaves, eps_k=0.1)
    end()
    torch.autograd.backward(list(outputs), [torch.ones_like(output) for output in outputs])
    end()
    return runs[0], runs[1]


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
def test_held_or_staged_every_row_crosses_memory_once(dtype, m, compress, plan, watched):
    with emulated(plan=plan, sanitizer="traffic", **H100):
        assert rows(watched, 256, m, compress, dtype) == once(m)


@pytest.mark.parametrize(
    ("d", "m"),
    [
        *((d, m) for m in (1, 4, 8) for d in (768, 2048, 4096)),
        (1024, 4),
        (1024, 8),
        *(pytest.param(8192, m, marks=pytest.mark.exhaustive) for m in (1, 4, 8)),
    ],
)
def test_so_it_does_at_the_usual_sizes(d, m, watched):
    with emulated(sanitizer="traffic", **H100):
        assert rows(watched, d, m, "channel" if m > 1 else "identity") == once(m)


@pytest.mark.parametrize("d", [768, 1024, 2048, 4096])
def test_a_token_read_moves_a_tenth_more_than_a_channel_read_at_most(d, watched):
    with emulated(sanitizer="traffic", **H100):
        moved = rows(watched, d, 4, "token")
    repeated = 3 / TOKENS  # the second of two chunks begins three tokens early
    for actual, expected in zip(moved, once(4, x=1), strict=True):
        assert actual.keys() == expected.keys()
        for name, count in expected.items():
            assert count <= actual[name] <= count * (1 + repeated), name
    channel = sum(sum(each.values()) for each in once(4))
    assert sum(sum(each.values()) for each in moved) <= 1.1 * channel


def test_without_clusters_what_a_block_has_no_room_for_is_read_again(watched):
    with emulated(sanitizer="traffic", **A100):
        forward, backward = rows(watched, 4096, 4, "channel")
        assert forward == once(4)[0]
        assert backward == {"X": 8, "G": 8, "k": 2, "dh": 1, "+dX": 4, "+dk": 1}, "held by L2"
        forward, backward = rows(watched, 4096, 4, "token")
        assert (backward["X"], backward["G"], backward["k"]) == (8, 4, 2), (
            "again for parameters_bwd"
        )
        assert 2 <= backward["dh"] <= 2 * (1 + 3 / TOKENS)


def test_plain_loads_are_counted_too(watched):
    """X is read twice from memory and counts twice, so the counting can fail."""
    with emulated(plan={"KEEP_IN_REGISTERS": 0, "STAGES": 0}, sanitizer="traffic", **H100):
        forward, backward = rows(watched, 256, 4, "channel")
    assert (forward["X"], forward["k"]) == (8, 2)
    assert (backward["X"], backward["G"], backward["k"]) == (8, 8, 2)
