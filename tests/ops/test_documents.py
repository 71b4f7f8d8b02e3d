"""Several documents in a sequence: what looks back in time stays within its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from ddl import functional, reference
from tests.ops import test_cached
from tests.ops.test_chain import run as run_chain
from tests.ops.test_ops import compare
from tests.ops.test_ops_torch import backward_arguments, positional
from tests.support.emulated_device import emulated, needs_emulator
from tests.support.helpers import documents, present
from tests.support.op_cases import BF16, F16, F32, F64, inputs, parameters
from tests.support.plain_operators import run_plain

BATCH, TIME, D = 3, 11, 24
REWRITE = ("state", "direction", "value", "gate")
DTYPES = pytest.mark.parametrize("dtype", [F64, F32, BF16, F16], ids=str)


def mask(*starts: list[int], time: int = TIME) -> Tensor:
    """Which tokens start a document, from their numbers in each sequence."""
    made = torch.zeros(len(starts), time, dtype=torch.bool)
    for row, tokens in zip(made, starts, strict=True):
        row[tokens] = True
    return made


MASKS = {
    "some": mask([0, 4, 5, 9], [2], [10]),
    "none": mask([], [], []),
    "the first": mask([0], [0], [0]),
    "all": torch.ones(BATCH, TIME, dtype=torch.bool),
    "runs": mask([3, 4, 5, 6], [0, 1, 8], []),
}
STARTS = pytest.mark.parametrize("starts", MASKS.values(), ids=MASKS)
READS = pytest.mark.parametrize(("m", "taps"), [(1, 3), (2, 4), (4, 4), (3, 7), (4, 1), (2, 20)])
Operator = Callable[..., Any]


def read_arguments(m: int, taps: int, batch: tuple[int, ...] = (BATCH, TIME)) -> dict[str, Any]:
    return inputs(batch, D, m) | parameters(D, m, "token", taps)


# --- the reference --------------------------------------------------------------------------------


def gradients(outputs: list[Tensor], leaves: dict[str, Tensor]) -> dict[str, Tensor]:
    loss = sum(output.sin().sum() for output in outputs)
    assert isinstance(loss, Tensor)
    found = torch.autograd.grad(loss, list(leaves.values()))
    return dict(zip(leaves, found, strict=True))


@STARTS
@READS
def test_the_reference_takes_documents_for_sequences(m, taps, starts):
    leaves = {n: t.requires_grad_() for n, t in read_arguments(m, taps).items() if t is not None}
    packed = reference.rewrite_read(**leaves, eps_k=0.1, document_starts=starts)
    alone = []
    for sequence, tokens in documents(starts):
        own = {n: t[sequence, tokens] if n in REWRITE else t for n, t in leaves.items()}
        alone.append(reference.rewrite_read(**own, eps_k=0.1))
    for outputs in zip(present(packed), *map(present, alone), strict=True):
        whole = outputs[0].flatten(0, 1)
        torch.testing.assert_close(whole, torch.cat(outputs[1:]), rtol=0, atol=1e-13)
    separate = [output for outputs in alone for output in present(outputs)]
    expected, found = gradients(separate, leaves), gradients(present(packed), leaves)
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=0, atol=1e-11, msg=name)


@STARTS
@READS
def test_the_reference_expands_documents_as_sequences(m, taps, starts):
    x = torch.randn(BATCH, TIME, D, dtype=F64, requires_grad=True)
    weight = torch.randn(D, m, taps, dtype=F64, requires_grad=True)
    packed = reference.expand(x, weight, value_channels=m, document_starts=starts)
    alone = [
        reference.expand(x[sequence, tokens], weight, value_channels=m)
        for sequence, tokens in documents(starts)
    ]
    torch.testing.assert_close(packed.flatten(0, 1), torch.cat(alone), rtol=0, atol=1e-13)
    leaves = {"x": x, "weight": weight}
    expected, found = gradients(alone, leaves), gradients([packed], leaves)
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=0, atol=1e-11, msg=name)


# --- the operators against it ---------------------------------------------------------------------


@STARTS
@DTYPES
@READS
def test_reads(dtype, m, taps, starts):
    given = read_arguments(m, taps)
    starts = starts.to(given["state"].device)
    compare("rewrite_read", given, dtype, eps_k=0.1, document_starts=starts)
    read = {name: tensor for name, tensor in given.items() if name not in REWRITE[1:]}
    compare("read", read, dtype, document_starts=starts)


@STARTS
@DTYPES
@READS
def test_expansions(dtype, m, taps, starts):
    given = {
        "x": torch.randn(BATCH, TIME, D, dtype=F64),
        "weight": torch.randn(D, m, taps, dtype=F64),
    }
    starts = starts.to(given["x"].device)
    compare("expand", given, dtype, value_channels=m, document_starts=starts)


def test_parts_of_the_tokens_begin_anywhere_in_a_document():
    """Long sequences are divided among threads; the borders know nothing of documents."""
    for seed in range(3):
        torch.manual_seed(seed)
        starts = torch.rand(2, 700) < 10.0 ** -(seed + 1)
        given = read_arguments(2, 5, (2, 700))
        compare("rewrite_read", given, F64, eps_k=0.1, document_starts=starts)
        expansion = {
            "x": torch.randn(2, 700, D, dtype=F64),
            "weight": torch.randn(D, 4, 5, dtype=F64),
        }
        compare("expand", expansion, F64, value_channels=4, document_starts=starts)


@STARTS
@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_a_document_gets_the_bits_that_it_gets_alone(dtype, starts):
    given = {n: t.to(dtype) for n, t in read_arguments(4, 4).items() if t is not None}
    given |= {n: given[n].float() for n in ("value", "gate")}
    packed = functional.rewrite_read(**given, eps_k=0.1, document_starts=starts)
    weight = given["compress"]
    expanded = functional.expand(
        given["direction"], weight, value_channels=4, document_starts=starts
    )
    for sequence, tokens in documents(starts):
        own = {n: t[sequence, tokens] if n in REWRITE else t for n, t in given.items()}
        alone = functional.rewrite_read(**own, eps_k=0.1)
        for whole, part in zip(present(packed), present(alone), strict=True):
            assert torch.equal(whole[sequence, tokens], part)
        x = given["direction"][sequence, tokens]
        part = functional.expand(x, weight, value_channels=4)
        assert torch.equal(expanded[sequence, tokens], part)


def test_no_start_changes_no_bit():
    given = {n: t.float() for n, t in read_arguments(4, 4).items() if t is not None}
    for starts in (MASKS["none"], MASKS["the first"]):
        marked = functional.rewrite_read(**given, eps_k=0.1, document_starts=starts)
        unmarked = functional.rewrite_read(**given, eps_k=0.1)
        for got, wanted in zip(present(marked), present(unmarked), strict=True):
            assert torch.equal(got, wanted)


@STARTS
@pytest.mark.parametrize("anchor_every", [2, 32])
def test_states_that_are_not_stored(anchor_every, starts, monkeypatch):
    """Gradients from an anchor have the bits of those from stored states."""
    plain = functional.rewrite_read
    chained = functional.rewrite_read_chained
    monkeypatch.setattr(
        functional, "rewrite_read", lambda *a, **o: plain(*a, document_starts=starts, **o)
    )
    monkeypatch.setattr(
        functional, "rewrite_read_chained", lambda *a, **o: chained(*a, document_starts=starts, **o)
    )
    calls = []
    for number in range(7):
        drawn = read_arguments(3, 4)
        if number > 0:
            del drawn["state"]
        leaves = {n: t.float().requires_grad_() for n, t in drawn.items() if t is not None}
        calls.append(leaves)
    named = {f"{n}.{name}": t for n, call in enumerate(calls) for name, t in call.items()}
    expected = gradients(run_chain(calls, None), named)
    found = gradients(run_chain(calls, anchor_every), named)
    for name, gradient in expected.items():
        assert torch.equal(found[name], gradient), name


def test_compiled_and_checkpointed():
    torch._dynamo.reset()
    leaves = {n: t.requires_grad_() for n, t in read_arguments(4, 4).items() if t is not None}

    def operators(document_starts: Tensor, **given: Tensor) -> list[Tensor]:
        result = functional.rewrite_read(**given, eps_k=0.1, document_starts=document_starts)
        expanded = functional.expand(
            result.context, given["compress"], value_channels=4, document_starts=document_starts
        )
        return [*present(result), expanded]

    starts = MASKS["some"]
    expected = gradients(operators(starts, **leaves), leaves)
    compiled = torch.compile(operators, backend="aot_eager", fullgraph=True)
    checkpointed = torch.utils.checkpoint.checkpoint(
        operators, starts, use_reentrant=False, **leaves
    )
    for outputs in (compiled(starts, **leaves), checkpointed):
        for name, gradient in gradients(outputs, leaves).items():
            assert torch.equal(gradient, expected[name]), name


# --- in pieces ------------------------------------------------------------------------------------


@STARTS
@test_cached.PIECES
@test_cached.DTYPES
@pytest.mark.parametrize("name", test_cached.NAMES)
@pytest.mark.parametrize(("m", "taps"), [(1, 3), (4, 4), (2, 20)])
@pytest.mark.table(2)
def test_pieces_are_read_as_the_whole_is(m, taps, name, dtype, pieces, starts):
    given = test_cached.case(dtype, m, taps)
    with torch.no_grad():
        actual = test_cached.in_pieces(given, name, pieces, starts)
        expected = test_cached.whole(given | {"document_starts": starts}, name)
    test_cached.assert_same_bits(actual, expected)


@STARTS
@test_cached.PIECES
@test_cached.DTYPES
@pytest.mark.parametrize(("m", "taps"), [(1, 3), (4, 4), (2, 20), (8, 40)])
@pytest.mark.table(2)
def test_pieces_are_expanded_as_the_whole_is(m, taps, dtype, pieces, starts):
    x, weight = test_cached.expansion(dtype, m, taps)
    with torch.no_grad():
        expected = functional.expand(x, weight, value_channels=m, document_starts=starts)
        actual = test_cached.expanded_in_pieces(x, weight, m, pieces, starts)
    assert torch.equal(actual, expected)


@STARTS
@test_cached.PIECES
@pytest.mark.parametrize(("m", "taps"), [(1, 3), (4, 4), (2, 20)])
def test_devices_without_kernels(m, taps, pieces, starts, monkeypatch):
    given = test_cached.case(F64, m, taps)
    x, weight = test_cached.expansion(F64, m, taps)
    name = "rewrite_read"
    expected = test_cached.whole(given | {"document_starts": starts}, name)
    state = functional.expand(x, weight, value_channels=m, document_starts=starts)
    run_plain(monkeypatch)
    options = {"rtol": 0, "atol": 1e-12}
    whole = test_cached.whole(given | {"document_starts": starts}, name)
    parts = test_cached.in_pieces(given, name, pieces, starts)
    for one, other, wanted in zip(whole, parts, expected, strict=True):
        torch.testing.assert_close(one, wanted, **options)
        torch.testing.assert_close(other, wanted, **options)
    actual = test_cached.expanded_in_pieces(x, weight, m, pieces, starts)
    torch.testing.assert_close(actual, state, **options)


# --- on the emulated GPU --------------------------------------------------------------------------

PLANS = test_cached.PLANS | {
    "separate sums": {"SUMS": 3},
    "sums in shared memory": {"SUMS": 1, "CHUNK": 2},
}


@needs_emulator
@STARTS
@DTYPES
@READS
@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
@pytest.mark.table(1)
def test_reads_on_a_gpu(plan, m, taps, dtype, starts):
    with emulated(plan=plan):
        test_reads(dtype, m, taps, starts)


@needs_emulator
@STARTS
@DTYPES
@READS
@pytest.mark.parametrize("plan", [{}, {"KEEP_IN_REGISTERS": 0}, {"CHUNK": 2}], ids=str)
@pytest.mark.table(1)
def test_expansions_on_a_gpu(plan, m, taps, dtype, starts):
    with emulated(plan=plan):
        test_expansions(dtype, m, taps, starts)


@needs_emulator
@STARTS
@test_cached.PIECES
@pytest.mark.parametrize("plan", test_cached.PLANS.values(), ids=test_cached.PLANS)
@pytest.mark.parametrize(("m", "taps"), [(1, 3), (4, 4), (2, 20)])
@pytest.mark.table(1)
def test_pieces_on_a_gpu(m, taps, plan, pieces, starts):
    given = test_cached.case(F32, m, taps)
    x, weight = test_cached.expansion(F32, m, taps)
    keep = {name: plan[name] for name in plan if name in ("KEEP_IN_REGISTERS", "CHUNK")}
    with emulated(plan=plan), torch.no_grad():
        for name in test_cached.NAMES:
            expected = test_cached.whole(given | {"document_starts": starts}, name)
            actual = test_cached.in_pieces(given, name, pieces, starts)
            test_cached.assert_same_bits(actual, expected)
    with emulated(plan=keep), torch.no_grad():
        state = functional.expand(x, weight, value_channels=m, document_starts=starts)
        assert torch.equal(test_cached.expanded_in_pieces(x, weight, m, pieces, starts), state)


# --- torch, and what does not fit -----------------------------------------------------------------


@pytest.mark.parametrize("name", ["read", "rewrite_read", "expand"])
def test_opcheck(name):
    known: dict[str, Any] = read_arguments(2, 4)
    known |= {"x": known["direction"], "weight": known["compress"], "value_channels": 2}
    leaves = {n: v.requires_grad_() if isinstance(v, Tensor) else v for n, v in known.items()}
    leaves["document_starts"] = MASKS["some"]
    operator = getattr(torch.ops.ddl, name).default
    given = positional(name, leaves)
    torch.library.opcheck(operator, given)
    detached = [x.detach() if isinstance(x, Tensor) else x for x in given]
    backward = getattr(torch.ops.ddl, f"{name}_backward").default
    with torch.no_grad():
        torch.library.opcheck(backward, backward_arguments(name, detached))


@pytest.mark.parametrize("home", ["cpu", "meta"])
def test_what_does_not_fit_is_refused(home):
    given = {n: t.to(home) for n, t in read_arguments(2, 4).items() if t is not None}
    within = given | {"compress": given["compress"][..., 0]}
    x, weight = given["direction"], given["compress"]
    starts, name = MASKS["some"].to(home), "`document_starts` must "
    shape = f"{name}have shape (3, 11), got (3, 10)"
    dtype = f"{name}have dtype torch.bool, got torch.int64"
    for arguments, marks, error, sentence in (
        (given, starts[:, 1:], ValueError, shape),
        (given, starts.long(), TypeError, dtype),
        (within, starts, ValueError, f"{name}be left out for a read within a token, got a tensor"),
    ):
        with pytest.raises(error) as refusal:
            functional.rewrite_read(**arguments, eps_k=0.1, document_starts=marks)
        assert str(refusal.value) == sentence
    repeated = f"{name}be left out for an expansion within a token, got a tensor"
    for kernel, marks, error, sentence in (
        (weight, starts[:, 1:], ValueError, shape),
        (weight, starts.long(), TypeError, dtype),
        (None, starts, ValueError, repeated),
    ):
        with pytest.raises(error) as refusal:
            functional.expand(x, kernel, value_channels=2, document_starts=marks)
        assert str(refusal.value) == sentence


def test_another_device_is_refused():
    given = {n: t for n, t in read_arguments(2, 4).items() if t is not None}
    with pytest.raises(ValueError, match=r"^`document_starts` must be on cpu, got a tensor on m"):
        functional.rewrite_read(**given, eps_k=0.1, document_starts=MASKS["some"].to("meta"))


def test_a_mask_is_no_number():
    """A bool tensor is an argument of its own kind."""
    given = {n: t for n, t in read_arguments(2, 4).items() if t is not None}
    expected = "`state` must have dtype float32, float64, bfloat16 or float16, got torch.bool"
    with pytest.raises(TypeError) as refusal:
        functional.read(given["state"].bool(), compress=given["compress"])
    assert str(refusal.value) == expected
