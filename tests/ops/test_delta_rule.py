"""`delta_rule` on the CPU against the float64 reference: outputs, and each gradient by name."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from ddl import functional, reference
from tests.support.delta_rule_cases import (
    LAYOUTS,
    LEAVES,
    LOG_DECAYS,
    check_mixed_decays,
    problem,
    results,
    rounded,
)
from tests.support.layouts import LAYOUTS as MEMORY
from tests.support.layouts import laid_out
from tests.support.op_cases import BF16, F16, F32, F64
from tests.support.tolerances import assert_close

DTYPES = (F64, F32, BF16, F16)


def agree(given: dict[str, Any], dtype: torch.dtype, **options: Any) -> None:
    """Compare everything with the reference, which gets the rounded arguments in float64."""
    given = rounded(given, dtype)
    actual = results(functional.delta_rule, given, **options)
    expected = results(reference.delta_rule, rounded(given, F64), **options)
    assert actual.keys() == expected.keys()
    for name, wanted in expected.items():
        gradient = name.startswith("gradient")
        of = given[name.removeprefix("gradient of ")] if gradient else None
        kind = dtype if of is None else of.dtype
        if name == "final_state":
            kind = F64 if dtype == F64 else F32
        # A gate's gradient depends on the rounded gradient of y.
        assert_close(name, actual[name], wanted, dtype if gradient else kind, gradient=gradient)
        assert actual[name].dtype == (kind if name != "y" else given["v"].dtype), name


@pytest.mark.table
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("g", [None, "head", "feature"])
@pytest.mark.parametrize("documents", [False, True])
@pytest.mark.parametrize("state", [False, True])
@pytest.mark.parametrize("T", [1, 9, 150])
def test_it_agrees(dtype, layout, g, documents, state, T):
    agree(problem(layout, T=T, g=g, state=state, documents=documents), dtype)


@pytest.mark.table
@pytest.mark.parametrize("dtype", [F64, F32], ids=str)
@pytest.mark.parametrize("K", [1, 15, 16, 33, 64, 256])
@pytest.mark.parametrize("V", [1, 16, 31, 33, 64, 256])
@pytest.mark.parametrize("g", ["head", "feature"])
@pytest.mark.parametrize("layout", ["single", "grouped", "steps"])
def test_sizes_that_do_not_fill_vectors(dtype, K, V, g, layout):
    agree(problem(layout, B=1, T=5, K=K, V=V, g=g), dtype)


@pytest.mark.parametrize("T", [63, 64, 65, 128, 1000])
def test_lengths_around_a_chunk(T):
    agree(problem("grouped", T=T, K=8, V=40, documents=True), F32)
    agree(problem("grouped", T=T, K=8, V=40), F64)


@pytest.mark.parametrize("g", [None, "head", "feature"])
@pytest.mark.parametrize("layout", ["alike", "steps, queries"])
def test_no_token_keeps_the_state(g, layout):
    given = problem(layout, T=0, g=g)
    agree(given, F32)
    assert torch.equal(functional.delta_rule(**given).final_state, given["initial_state"])
    none = functional.delta_rule(**problem(layout, T=0, g=g, state=False))
    assert not none.final_state.any()
    assert functional.delta_rule(**problem(layout, B=0, g=g)).y.shape[0] == 0


@pytest.mark.parametrize("of", [("y",), ("final_state",)])
@pytest.mark.parametrize("g", [None, "head", "feature"])
@pytest.mark.parametrize("layout", ["alike", "steps", "queries to states"])
def test_gradients_of_one_output_alone(of, g, layout):
    agree(problem(layout, T=70, g=g, documents=True), F32, of=of)


@pytest.mark.table(1)
@pytest.mark.parametrize("memory", MEMORY)
@pytest.mark.parametrize("argument", LEAVES)
@pytest.mark.parametrize("layout", ["alike", "steps"])
def test_strides(memory, argument, layout):
    given = problem(layout, g="feature")
    agree(given | {argument: laid_out(given[argument], memory)}, F64)


def test_a_mix_of_dtypes():
    given = rounded(problem("grouped", T=70, K=16, V=40), F32)
    mixed = given | {"q": given["q"].to(BF16), "v": given["v"].to(F16)}
    exact = results(reference.delta_rule, rounded(mixed, F64))
    found = results(functional.delta_rule, mixed)
    assert (found["y"].dtype, found["final_state"].dtype) == (F16, F32)
    for name, expected in exact.items():
        assert_close(name, found[name], expected, BF16, gradient=name.startswith("gradient"))


def test_half_precision_gates_are_converted():
    given = rounded(problem("alike"), BF16)
    half = given | {name: given[name].to(BF16) for name in ("beta", "g", "initial_state")}
    wide = half | {name: half[name].to(F32) for name in ("beta", "g", "initial_state")}
    assert torch.equal(functional.delta_rule(**half).y, functional.delta_rule(**wide).y)


@pytest.mark.table(0)
@pytest.mark.parametrize("T", [2048, 4096])
@pytest.mark.parametrize("g", ["head", "feature"])
def test_long_sequences_do_not_drift(g, T):
    """The gradient of g is summed over time, and as exact after thousands of tokens as after 64."""
    given = problem("alike", B=1, T=T, K=16, V=32, g=g)
    given["g"] = 0.01 * given["g"]  # states last
    agree(given, F32)


@pytest.mark.parametrize("g", ["head", "feature"])
def test_strong_and_absent_decays(g):
    given = problem("alike", T=70, g=g)
    given["g"].flatten()[::3] = 0.0
    given["g"].flatten()[1::7] = -200.0
    given["g"].flatten()[2::11] = 0.5
    agree(given, F64)
    agree(given, F32)


@pytest.mark.table
@pytest.mark.parametrize("dtype", [F64, F32], ids=str)
@pytest.mark.parametrize("layout", ["alike", "steps", "queries to states"])
@pytest.mark.parametrize("g", ["head", "feature"])
@pytest.mark.parametrize("log_decay", LOG_DECAYS)
def test_gradients_are_exact_however_small(dtype, layout, g, log_decay):
    """Errors are relative to each gradient: that of g is as small as exp g.

    Decays differ by 1 %: if all were one number, a rounding of exp would add up over the tokens.
    """
    given = problem(layout, T=70, K=16, V=32, g=g)
    given["g"] = log_decay * (1 + 0.01 * given["g"])  # g is in [−1, 0]
    agree(given, dtype)


@pytest.mark.parametrize("g", ["head", "feature"])
def test_a_strong_decay_among_weak_ones_has_an_exact_gradient(g):
    check_mixed_decays(g)


def test_scale():
    given = problem("alike", K=4) | {"scale": 0.5}
    agree(given, F64)
    assert torch.equal(
        functional.delta_rule(**given).y, functional.delta_rule(**given | {"scale": None}).y
    )


@pytest.mark.parametrize("g", ["head", "feature"])
@pytest.mark.parametrize("layout", ["alike", "grouped", "crossed", "steps"])
def test_the_same_bits_for_any_number_of_threads(layout, g):
    given = rounded(problem(layout, T=200, K=32, V=80, g=g, documents=True), F32)
    runs = []
    threads = torch.get_num_threads()
    for count in (1, 2, 3):
        torch.set_num_threads(count)
        runs.append(results(functional.delta_rule, given))
    torch.set_num_threads(threads)
    for name, expected in runs[0].items():
        assert all(torch.equal(run[name], expected) for run in runs[1:]), name


@pytest.mark.table
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("g", [None, "head", "feature"])
@pytest.mark.parametrize("starts", [None, False, True])
@pytest.mark.parametrize("state", [False, True])
@pytest.mark.parametrize(("K", "V"), [(5, 3), (33, 16), (16, 80), (64, 128), (7, 40)])
@torch.no_grad()
def test_a_single_step_of_generation(dtype, layout, g, starts, state, K, V):
    """Without a backward, whose states it would have to save; for any number of threads."""
    given = rounded(problem(layout, T=1, K=K, V=V, g=g, state=state), dtype)
    if starts is not None:
        given["document_starts"] = torch.tensor([[starts], [not starts]])
        if state:
            given["initial_state"][0 if starts else 1] = torch.nan  # of another document
    found = functional.delta_rule(**given)
    expected = reference.delta_rule(**rounded(given, F64))
    assert_close("y", found.y, expected.y, dtype)
    assert_close(
        "final_state", found.final_state, expected.final_state, F64 if dtype == F64 else F32
    )
    assert found.y.dtype == dtype
    threads = torch.get_num_threads()
    torch.set_num_threads(3)
    again = functional.delta_rule(**given)
    torch.set_num_threads(threads)
    assert torch.equal(again.y, found.y)
    assert torch.equal(again.final_state, found.final_state)


@pytest.mark.parametrize("layout", ["alike", "steps", "queries to states"])
def test_a_decay_of_zeros_has_no_gradient(layout):
    """Neither before the first token of all nor of a document, not even one of rounding."""
    given = rounded(problem(layout, T=5, K=16, V=16, state=False, documents=True), F32)
    given["document_starts"] = torch.tensor([[False, False, True, False, False]] * 2)
    gradient = results(functional.delta_rule, given)["gradient of g"]
    assert not gradient[:, [0, 2]].any()
    assert gradient[:, [1, 3, 4]].any()


def test_what_is_saved_changes_no_bit():
    given = rounded(problem("grouped", T=100, K=16, V=40), F32)
    recorded = results(functional.delta_rule, given)
    with torch.no_grad():
        plain = functional.delta_rule(**given)
    assert torch.equal(plain.y, recorded["y"])
    assert torch.equal(plain.final_state, recorded["final_state"])


def test_a_later_token_is_never_seen():
    """Not even its NaN; a token's rounding may depend on whether one follows it."""
    given = rounded(problem("alike", T=100), F32)
    whole = functional.delta_rule(**given).y
    for first in (40, 41):
        spoiled = {name: x.clone() if isinstance(x, Tensor) else x for name, x in given.items()}
        for name in ("q", "k", "v", "beta", "g"):
            spoiled[name][:, first:] = torch.nan
        found = functional.delta_rule(**spoiled).y
        torch.testing.assert_close(found[:, :first], whole[:, :first])


@pytest.mark.parametrize("first", [40, 41])
def test_another_document_is_never_seen(first):
    """Not even a NaN of it, forward and backward."""
    given = problem("alike", T=100, documents=True)
    starts = given["document_starts"].zero_()
    starts[:, first] = True
    spoiled = {
        name: x.clone() if isinstance(x, Tensor) else x for name, x in rounded(given, F32).items()
    }
    whole = results(functional.delta_rule, spoiled, of=("y",))
    spoiled["v"][:, :first] = torch.nan
    spoiled["initial_state"].fill_(torch.inf)
    later = results(functional.delta_rule, spoiled, of=("y",))
    for name in (
        "y",
        "gradient of q",
        "gradient of k",
        "gradient of v",
        "gradient of beta",
        "gradient of g",
    ):
        assert torch.equal(later[name][:, first:], whole[name][:, first:]), name
    assert torch.equal(later["final_state"], whole["final_state"])


def test_a_sequence_in_pieces_equals_the_whole_one():
    given = rounded(problem("steps", T=100), F32)
    whole = functional.delta_rule(**given)
    state, y = given["initial_state"], []
    timed = ("q", "k", "v", "beta", "g")
    for first, last in ((0, 1), (1, 40), (40, 40), (40, 100)):
        piece = {name: given[name][:, first:last] for name in timed}
        found = functional.delta_rule(**piece, initial_state=state)
        state = found.final_state
        y.append(found.y)
    torch.testing.assert_close(torch.cat(y, 1), whole.y)
    torch.testing.assert_close(state, whole.final_state)
