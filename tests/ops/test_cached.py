"""Cached reads: a sequence in pieces is read as the whole is."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from ddl import functional
from ddl.results import ReadParameters, Write
from tests.ops.test_ops_torch import positional
from tests.support.emulated_device import emulated, needs_emulator
from tests.support.helpers import present
from tests.support.op_cases import BF16, F16, F32, F64, inputs, parameters
from tests.support.plain_operators import run_plain
from tests.support.tolerances import compute_dtype

TIME, D = 11, 24
REWRITE = ("direction", "value", "gate")
NAMES = ["read", "rewrite_read"]
DTYPES = pytest.mark.parametrize("dtype", [F64, F32, BF16, F16], ids=str)
READS = pytest.mark.parametrize(
    ("m", "taps"), [(1, None), (4, 0), (1, 3), (2, 4), (4, 4), (3, 7), (4, 1), (2, 20)]
)
PIECES = pytest.mark.parametrize("pieces", [[1] * TIME, [4, 1, 1, 5], [2, 9], [1, 7, 3]], ids=str)


def case(dtype: torch.dtype, m: int, taps: int | None, batch: int = 3) -> dict[str, Any]:
    """Arguments of a whole sequence. taps: K of a token read; 0 for channel, None for identity."""
    compress = "identity" if taps is None else "token" if taps else "channel"
    given = inputs((batch, TIME), D, m) | parameters(D, m, compress, taps or 1)
    small = compute_dtype(dtype)
    return {
        name: tensor.to(small if name in ("value", "gate") else dtype)
        for name, tensor in given.items()
        if tensor is not None
    }


def whole(given: dict[str, Any], name: str) -> tuple[Tensor, ...]:
    options = {n: x for n, x in given.items() if n not in (*REWRITE, "state")}
    if name == "read":
        return tuple(present(functional.read(given["state"], **options)))
    rewrite = [given[n] for n in REWRITE]
    return tuple(present(functional.rewrite_read(given["state"], *rewrite, eps_k=0.1, **options)))


def continuing(given: dict[str, Any], name: str) -> Any:
    """A call with the tensors of some tokens, what past ones left, and the starts of documents."""
    options = {n: x for n, x in given.items() if n not in (*REWRITE, "state")}
    read = ReadParameters(**options)

    def call(*tensors: Any) -> tuple[Any, ...]:
        state, *rewrite, pending, starts = tensors
        past: dict[str, Any] = {"pending": pending, "continues": True}
        if name == "read":
            result, left = functional.read_with(state, read, starts, **past)
        else:
            result, left = functional.step(state, Write(*rewrite, 0.1), read, starts, **past)
        return (*result, left)

    return call


def in_pieces(
    given: dict[str, Any], name: str, pieces: list[int], starts: Tensor | None = None
) -> tuple[Tensor, ...]:
    """starts: which tokens start a document."""
    call, pending, outputs = continuing(given, name), None, []
    along_time = ["state"] if name == "read" else ["state", *REWRITE]
    for first, length in zip(itertools.accumulate([0, *pieces]), pieces, strict=False):
        tensors = [given[n][:, first : first + length] for n in along_time]
        own = None if starts is None else starts[:, first : first + length]
        *output, pending = call(*tensors, pending, own)
        outputs.append(output)
    return tuple(torch.cat(parts, dim=1) for parts in zip(*outputs, strict=True))


def assert_same_bits(actual: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> None:
    assert len(actual) == len(expected)
    for got, wanted in zip(actual, expected, strict=True):
        assert torch.equal(got, wanted)


def assert_close(actual: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
    for got, wanted in zip(actual, expected, strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-4)


@DTYPES
@READS
@PIECES
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.table(2)
def test_pieces_are_read_as_the_whole_is(mode, name, pieces, m, taps, dtype):
    given = case(dtype, m, taps)
    with mode():
        assert_same_bits(in_pieces(given, name, pieces), whole(given, name))


@READS
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("absent", [("value",), ("gate",), ("value", "gate")], ids=str)
@pytest.mark.parametrize("where", ["eager", "compiled", "without kernels"])
@pytest.mark.table
def test_an_absent_output_is_none(where, absent, name, m, taps, monkeypatch):
    given = case(F64, m, taps)
    options = {n: None if n.startswith(tuple(f"{a}_" for a in absent)) else x
               for n, x in given.items()}  # fmt: skip
    if where == "without kernels":
        run_plain(monkeypatch)
    tensors = [given["state"], *(given[n] for n in REWRITE if name != "read"), None, None]

    def step() -> Any:
        return continuing(options, name)(*tensors)

    step = torch.compile(step, backend="eager", fullgraph=True) if where == "compiled" else step
    with torch.no_grad():
        *_, context, value, gate, pending = step()
    there = [context is not None, value is not None, gate is not None, pending is not None]
    assert there == [True, "value" not in absent, "gate" not in absent, bool(taps and taps > 1)]


def test_many_sequences_and_long_pieces_are_split_among_threads():
    """Parts of 8,192 elements: their borders lie inside sequences and between them."""
    torch.manual_seed(0)
    for batch, pieces in ((40, [1] * TIME), (9, [5, 6]), (3, [TIME])):
        given = {n: x.repeat(1, 40, *(1,) * (x.ndim - 2)) if x.ndim > 1 and x.shape[1] == TIME
                 else x for n, x in case(F32, 8, 4, batch).items()}  # fmt: skip
        pieces = [40 * piece for piece in pieces] if batch < 40 else [1] * 40 * TIME
        assert_same_bits(in_pieces(given, "rewrite_read", pieces), whole(given, "rewrite_read"))


@READS
@PIECES
@pytest.mark.parametrize("name", NAMES)
def test_devices_without_kernels_read_pieces_too(name, pieces, m, taps, monkeypatch):
    given = case(F64, m, taps)
    expected = whole(given, name)
    run_plain(monkeypatch)
    for got, wanted in zip(in_pieces(given, name, pieces), expected, strict=True):
        torch.testing.assert_close(got, wanted, rtol=0, atol=1e-12)


def test_what_is_left_is_the_sum_over_the_last_tokens():
    given = case(F64, 2, 4)
    *_, pending = continuing(given, "read")(given["state"], None, None)
    state, weight = given["state"], given["compress"]
    for later in range(3):
        expected = sum(
            (state[:, TIME - back] * weight[..., back + later]).sum(-1)
            for back in range(1, 4 - later)
        )
        torch.testing.assert_close(pending[:, later], expected, rtol=0, atol=1e-13)


PLANS = {
    "as planned": {},
    "one stage": {"STAGES": 1},
    "in memory": {"KEEP_IN_REGISTERS": 0, "STAGES": 0},
    "window in shared memory": {"WINDOW": 1},
    "window in memory": {"WINDOW": 2},
    "chunks of three": {"CHUNK": 3},
}


@needs_emulator
@DTYPES
@READS
@PIECES
@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
@pytest.mark.table(1)
def test_pieces_are_read_as_the_whole_is_on_a_gpu(plan, pieces, m, taps, dtype):
    given = case(dtype, m, taps)
    with emulated(plan=plan):
        for name in NAMES:
            assert_same_bits(in_pieces(given, name, pieces), whole(given, name))


# --- the expansion --------------------------------------------------------------------------------

EXPANSIONS = pytest.mark.parametrize(
    ("m", "taps"), [(1, None), (4, None), (1, 3), (4, 4), (3, 1), (2, 20), (8, 40)]
)


def expansion(dtype: torch.dtype, m: int, taps: int | None) -> tuple[Tensor, Tensor | None]:
    weight = None if taps is None else torch.randn(D, m, taps, dtype=F64).to(dtype)
    return torch.randn(3, TIME, D, dtype=F64).to(dtype), weight


def expanded_in_pieces(
    x: Tensor, weight: Tensor | None, m: int, pieces: list[int], starts: Tensor | None = None
) -> Tensor:
    before, states = None, []
    split = [None] * len(pieces) if starts is None else starts.split(pieces, dim=1)
    for piece, own in zip(x.split(pieces, dim=1), split, strict=True):
        state, before = functional.expand_to(piece, weight, m, own, before=before, continues=True)
        states.append(state)
    return torch.cat(states, dim=1)


@DTYPES
@EXPANSIONS
@PIECES
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_pieces_are_expanded_as_the_whole_is(mode, pieces, m, taps, dtype):
    x, weight = expansion(dtype, m, taps)
    with mode():
        expected = functional.expand(x, weight, value_channels=m)
        assert torch.equal(expanded_in_pieces(x, weight, m, pieces), expected)


@EXPANSIONS
@PIECES
def test_devices_without_kernels_expand_pieces_too(pieces, m, taps, monkeypatch):
    x, weight = expansion(F64, m, taps)
    expected = functional.expand(x, weight, value_channels=m)
    run_plain(monkeypatch)
    actual = expanded_in_pieces(x, weight, m, pieces)
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-12)


@needs_emulator
@DTYPES
@EXPANSIONS
@PIECES
@pytest.mark.parametrize("plan", [{}, {"KEEP_IN_REGISTERS": 0}, {"CHUNK": 2}], ids=str)
@pytest.mark.table(1)
def test_pieces_are_expanded_as_the_whole_is_on_a_gpu(plan, pieces, m, taps, dtype):
    x, weight = expansion(dtype, m, taps)
    with emulated(plan=plan):
        expected = functional.expand(x, weight, value_channels=m)
        assert torch.equal(expanded_in_pieces(x, weight, m, pieces), expected)


@EXPANSIONS
def test_opcheck_of_the_expansion(m, taps):
    x, weight = expansion(F64, m, taps)
    before = torch.randn(3, taps - 1, D, dtype=F64) if taps and taps > 1 else None
    with torch.no_grad():
        for left in (None, before):
            arguments = [x, weight, None, m, left, False]
            torch.library.opcheck(torch.ops.ddl.expand.default, arguments)
            torch.library.opcheck(torch.ops.ddl.expand.kernel, arguments)


@pytest.mark.parametrize("home", ["cpu", "meta"])
def test_what_does_not_fit_an_expansion_is_refused(home):
    x, weight = expansion(F64, 2, 4)
    before = torch.zeros(3, 3, D, dtype=F64)
    for given, left, error, sentence in (
        (x, before[:, 1:], ValueError, "`before` must have shape (3, 3, 24), got (3, 2, 24)"),
        (x, before.float(), TypeError, "`before` must have dtype torch.float64, got torch.f"),
        (x[:, :0], before, ValueError, "`x` must have shape with at least one token, got (3, 0, "),
    ):
        left = None if left is None else left.to(home)
        for mode in (torch.no_grad, torch.inference_mode):
            with mode(), pytest.raises(error) as refusal:
                functional.expand_to(
                    given.to(home), weight.to(home), 2, before=left, continues=True
                )
            assert str(refusal.value).startswith(sentence)
    sentence = "^`before` must be left out for an expansion within a token, got a tensor$"
    with pytest.raises(ValueError, match=sentence):
        functional.expand_to(x, None, 2, before=before, continues=True)


# --- torch, and what does not fit -----------------------------------------------------------------


@pytest.mark.table(1)
@READS
@pytest.mark.parametrize("name", NAMES)
def test_opcheck(name, m, taps):
    given = case(F64, m, taps)
    pending = torch.randn(3, taps - 1, D, dtype=F64) if taps and taps > 1 else None
    for left in (None, pending):
        arguments = positional(name, given | {"pending": left, "saves": False})
        with torch.no_grad():
            torch.library.opcheck(getattr(torch.ops.ddl, name).default, arguments)
            torch.library.opcheck(getattr(torch.ops.ddl, name).kernel, arguments)


@pytest.mark.parametrize("home", ["cpu", "meta"])
@pytest.mark.parametrize("name", NAMES)
def test_what_does_not_fit_is_refused(name, home):
    pending = torch.zeros(3, 3, D, dtype=F64)
    within = {"compress": torch.zeros(D, 2, dtype=F64)}
    empty = {n: x[:, :0] for n, x in case(F64, 2, 4).items() if n in ("state", *REWRITE)}
    for change, left, error, sentence in (
        ({}, pending[:, 1:], ValueError, "`pending` must have shape (3, 3, 24), got (3, 2, 24)"),
        ({}, pending[1:], ValueError, "`pending` must have shape (3, 3, 24), got (2, 3, 24)"),
        ({}, pending.float(), TypeError, "`pending` must have dtype torch.float64, got torch.f"),
        (within, pending, ValueError, "`pending` must be left out for a read within a token, got"),
        (
            empty,
            pending,
            ValueError,
            "`state` must have shape with at least one token, got (3, 0",
        ),
    ):
        given = {n: x.to(home) for n, x in (case(F64, 2, 4) | change).items()}
        tensors = [given[n] for n in (["state"] if name == "read" else ["state", *REWRITE])]
        for mode in (torch.no_grad, torch.inference_mode):
            with mode(), pytest.raises(error) as refusal:
                continuing(given, name)(*tensors, None if left is None else left.to(home), None)
            assert str(refusal.value).startswith(sentence)


def test_another_device_is_refused():
    given = case(F64, 2, 4)
    elsewhere = torch.zeros(3, 3, D, dtype=F64, device="meta")
    with pytest.raises(ValueError, match=r"^`pending` must be on cpu, got a tensor on meta$"):
        continuing(given, "read")(given["state"], elsewhere, None)


@pytest.mark.parametrize("name", NAMES)
def test_nothing_is_recorded(name):
    given = case(F64, 2, 4)
    given["compress"].requires_grad_()
    with pytest.raises(
        ValueError, match=r"^a step with a cache must be called under torch.no_grad\(\)"
    ):
        in_pieces(given, name, [5, 6])
