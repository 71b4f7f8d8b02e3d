"""`delta_rule` on devices without kernels: chunks in plain PyTorch, or flash-linear-attention."""

from __future__ import annotations

import sys
import types
from typing import Any

import pytest
import torch
from torch import Tensor

from ddl import functional, reference
from ddl.ops import chunked, declarations, devices
from tests.support.delta_rule_cases import (
    LAYOUTS,
    LEAVES,
    LOG_DECAYS,
    check_mixed_decays,
    problem,
    results,
    rounded,
)
from tests.support.op_cases import BF16, F32, F64
from tests.support.tolerances import assert_close


@pytest.fixture(autouse=True)
def _without_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the CPU a device without kernels."""
    monkeypatch.setattr(devices, "WITH_KERNELS", ("meta",))


def agree(given: dict[str, Any], dtype: torch.dtype, depth: int = 1) -> None:
    given = rounded(given, dtype)
    actual = results(functional.delta_rule, given)
    expected = results(reference.delta_rule, rounded(given, F64))
    assert actual.keys() == expected.keys()
    for name, wanted in expected.items():
        gradient = name.startswith("gradient")
        assert_close(name, actual[name], wanted, dtype, gradient=gradient, depth=depth)


@pytest.mark.table
@pytest.mark.parametrize("dtype", [F64, F32, BF16], ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("g", [None, "head", "feature"])
@pytest.mark.parametrize("documents", [False, True])
@pytest.mark.parametrize("state", [False, True])
@pytest.mark.parametrize("T", [1, 9, 70, 150])
def test_chunks_agree(dtype, layout, g, documents, state, T):
    agree(problem(layout, T=T, g=g, state=state, documents=documents), dtype)


def test_a_direct_call_of_the_operator_has_gradients():
    given = problem("steps")
    leaves = [given[name].requires_grad_() for name in LEAVES]
    known = given | {"saves": True}
    direct = torch.ops.ddl.delta_rule(*map(known.get, declarations.delta_rule.names))
    gradients = [
        torch.autograd.grad(y.sin().sum() + state.sum(), leaves)
        for y, state, *_ in (direct, functional.delta_rule(**given))
    ]
    for name, *pair in zip(LEAVES, *gradients, strict=True):
        assert torch.equal(*pair), name


def test_no_token_keeps_the_state():
    given = problem("steps, queries", T=0)
    found = functional.delta_rule(**given)
    assert found.y.shape == reference.delta_rule(**given).y.shape
    assert torch.equal(found.final_state, given["initial_state"])


@pytest.mark.parametrize("g", ["head", "feature"])
def test_strong_and_absent_decays(g):
    given = problem("alike", T=70, g=g)
    given["g"].flatten()[::3] = 0.0
    given["g"].flatten()[1::7] = -torch.inf
    expected = reference.delta_rule(**given)
    found = functional.delta_rule(**given)
    assert_close("y", found.y, expected.y, F64)
    assert_close("final_state", found.final_state, expected.final_state, F64)


@pytest.mark.parametrize("g", ["head", "feature"])
@pytest.mark.parametrize("log_decay", LOG_DECAYS)
def test_gradients_are_exact_however_small(g, log_decay):
    """Errors are relative to each gradient: that of g is as small as exp g."""
    given = problem("alike", T=70, K=16, V=32, g=g)
    given["g"].fill_(log_decay)
    agree(given, F32)


@pytest.mark.parametrize("g", ["head", "feature"])
def test_a_strong_decay_among_weak_ones_has_an_exact_gradient(g):
    check_mixed_decays(g)


# --- NaN ------------------------------------------------------------------------------------------


def spoilt(name: str, x: Tensor, token: int) -> Tensor:
    """A copy with a NaN in the first sequence and head, at a token or, of a state, anywhere."""
    x = x.clone()
    (x[0] if name.endswith("state") else x[0, token]).view(-1)[0] = torch.nan
    return x


def reached(name: str, x: Tensor) -> Tensor:
    """The rows with numbers that are not finite, one for each token, step and head."""
    wild = ~x.isfinite()
    if name.endswith("state"):
        return wild.flatten(2).any(-1)
    without_features = name.endswith("beta") or (name.endswith("of g") and x.ndim == 3)
    return wild if without_features else wild.any(-1)


@pytest.mark.table
@pytest.mark.parametrize("layout", ["alike", "steps", "queries to states"])
@pytest.mark.parametrize("g", [None, "head", "feature"])
@pytest.mark.parametrize("documents", [False, True])
@pytest.mark.parametrize("token", [0, 30, 66])
@pytest.mark.parametrize("name", [*LEAVES, "y", "final_state"])
def test_nan_reaches_no_more_than_in_the_recurrence(layout, g, documents, token, name):
    """In an argument or an output's gradient. What it does not reach keeps every bit."""
    given = rounded(problem(layout, T=70, K=8, V=4, g=g, documents=documents), F32)
    if name == "g" and g is None:
        return
    if documents:  # at a start there is no state: zeros in its place are not multiplied by NaN
        given["document_starts"][0, token] = False
    clean = results(functional.delta_rule, given)
    changes = {}
    if name in given:
        given[name] = spoilt(name, given[name], token)
    else:
        changes["change"] = lambda of, x: spoilt(of, x, token) if of == name else x
    actual = results(functional.delta_rule, given, **changes)
    expected = results(reference.delta_rule, rounded(given, F64), **changes)
    for output, wanted in expected.items():
        rows, wanted_rows = reached(output, actual[output]), reached(output, wanted)
        if output == "gradient of g" and documents:  # likewise
            wanted_rows[given["document_starts"]] = False
        assert torch.equal(rows, wanted_rows), output
        finite = actual[output].isfinite()
        assert torch.equal(actual[output][finite], clean[output][finite]), output


def test_compiled_equals_eager():
    compiled = torch.compile(functional.delta_rule, fullgraph=True, backend="aot_eager")
    given = rounded(problem("steps, queries", T=40, g="head", documents=True), F32)
    actual, expected = results(compiled, given), results(functional.delta_rule, given)
    for name in expected:
        assert torch.equal(actual[name], expected[name]), name
    torch._dynamo.reset()


def test_arguments_are_checked_there_too():
    given = problem()
    with pytest.raises(ValueError, match=r"^`g` must have shape"):
        functional.delta_rule(**given | {"g": torch.zeros(3, dtype=F64)})


def test_autocast_does_not_round_the_chunks():
    given = rounded(problem("alike", T=70), F32)
    expected = functional.delta_rule(**given)
    with torch.autocast("cpu", dtype=BF16):
        assert torch.equal(functional.delta_rule(**given).y, expected.y)


# --- flash-linear-attention -----------------------------------------------------------------------


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A stand-in for the package, which computes by the reference, and the names of its calls."""
    names: list[str] = []

    def kernel(name: str, gated: bool) -> Any:
        def call(q: Tensor, k: Tensor, v: Tensor, *rest: Tensor, **options: Any) -> Any:
            names.append(name)
            assert options.pop("output_final_state")
            assert q.shape[2] == k.shape[2] == v.shape[2] == rest[-1].shape[2]
            g, beta = rest if gated else (None, *rest)
            return tuple(reference.delta_rule(q, k, v, beta, g, **options))

        return call

    for room, name in (
        ("delta_rule", "chunk_delta_rule"),
        ("gated_delta_rule", "chunk_gated_delta_rule"),
        ("kda", "chunk_kda"),
    ):
        module = types.ModuleType(f"fla.ops.{room}")
        setattr(module, name, kernel(name, name != "chunk_delta_rule"))
        monkeypatch.setitem(sys.modules, module.__name__, module)
    for name in ("fla", "fla.ops"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setattr(chunked, "_kernels_take", lambda _: True)
    return names


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    ("g", "name"),
    [(None, "chunk_delta_rule"), ("head", "chunk_gated_delta_rule"), ("feature", "chunk_kda")],
)
def test_its_kernels_get_one_query_key_and_value_for_each_state(calls, layout, g, name):
    given = problem(layout, T=9, g=g)
    found, expected = functional.delta_rule(**given), reference.delta_rule(**given)
    assert calls == [name]
    assert_close("y", found.y, expected.y, F64)
    assert_close("final_state", found.final_state, expected.final_state, F64)


def test_it_takes_problems_of_its_kernels_alone(monkeypatch):
    monkeypatch.setattr(chunked, "_installed", lambda: True)
    taken = []
    for change in ({}, {"q": F32}, {"v": F64}, {"documents": True}, {"K": 257}):
        sizes = {"documents": change.pop("documents", False), "K": change.pop("K", 256)}
        given = rounded(problem("alike", **sizes), BF16)
        given |= {name: given[name].to(dtype) for name, dtype in change.items()}
        given = {n: x.to("meta") if x is not None else None for n, x in given.items()}
        cuda = types.SimpleNamespace(
            **{n: Elsewhere(x) if x is not None else None for n, x in given.items()}
        )
        taken.append(chunked._kernels_take(cuda))
    assert taken == [True, False, False, False, False]


@pytest.mark.parametrize(
    ("version", "capability", "refused"),
    [
        ("3.3.1", (9, 0), False),
        ("3.4.0", (9, 0), True),
        ("3.7.0+git1", (9, 0), True),
        ("3.7.1", (9, 0), False),
        ("3.6.0", (10, 0), False),
        ("3.6.0", (8, 0), False),
    ],
)
def test_a_decay_per_head_waits_for_a_triton_that_compiles_it(
    version, capability, refused, monkeypatch
):
    """On Hopper flash-linear-attention raises in that backward; chunks run instead."""
    triton = types.ModuleType("triton")
    triton.__version__ = version
    monkeypatch.setitem(sys.modules, "triton", triton)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    monkeypatch.setattr(chunked, "_installed", lambda: True)
    chunked._refused.cache_clear()
    taken = {}
    for g in (None, "head", "feature"):
        given = rounded(problem("alike", g=g), BF16) | {"document_starts": None}
        cuda = types.SimpleNamespace(
            **{n: Elsewhere(x) if x is not None else None for n, x in given.items()}
        )
        taken[g] = chunked._kernels_take(cuda)
    chunked._refused.cache_clear()
    assert taken == {None: True, "head": not refused, "feature": True}


class Elsewhere:
    """A tensor as if on a CUDA device."""

    def __init__(self, tensor: Tensor) -> None:
        self.dtype, self.shape, self.ndim = tensor.dtype, tensor.shape, tensor.ndim
        self.device = torch.device("cuda")
