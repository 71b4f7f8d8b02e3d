"""Rewrites that erase and write apart, or erase nothing, against the reference."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from ddl import functional
from ddl.results import Chain, ReadResult, RewriteReadResult
from tests.ops.test_ops import compare
from tests.support.op_cases import BF16, F16, F32, F64, inputs, parameters
from tests.support.refused_cases import refused
from tests.support.tolerances import assert_close

DTYPES = pytest.mark.parametrize("dtype", [F64, F32, BF16, F16], ids=str)
READS = pytest.mark.parametrize(
    ("m", "compress"), [(1, "identity"), (3, "channel"), (4, "channel"), (4, "token")]
)
REWRITES = pytest.mark.parametrize("rewrites", [None, 1, 3])
ERASE = pytest.mark.parametrize("erase", ["none", "separate"])


def gate(tensors: dict[str, Tensor]) -> Tensor:
    """α, other than β."""
    return 2 - 0.9 * tensors["gate"].flip(0)


def weights(tensors: dict[str, Tensor | None]) -> dict[str, Tensor]:
    """Those of α, other than those of β."""
    found = {name: tensors[f"gate_{name}"] for name in ("weight", "bias")}
    return {f"erase_{name}": -0.7 * tensor for name, tensor in found.items() if tensor is not None}


@pytest.mark.table
@DTYPES
@READS
@REWRITES
@ERASE
def test_rewrite_read(dtype, m, compress, rewrites, erase):
    tensors = inputs((2, 40), 63, m, rewrites) | parameters(63, m, compress, 4, rewrites)
    options = {"eps_k": 0.1}
    if erase == "separate":
        tensors |= {"erase": gate(tensors), **weights(tensors)}
    else:
        options["erase"] = erase
    compare("rewrite_read", tensors, dtype, **options)


@DTYPES
@REWRITES
@pytest.mark.parametrize("m", [1, 4])
@pytest.mark.parametrize("d", [63, 384])
def test_rewrite(dtype, m, d, rewrites):
    tensors = inputs((2, 40), d, m, rewrites)
    compare("rewrite", tensors | {"erase": gate(tensors)}, dtype, eps_k=0.1)
    compare("rewrite", tensors, dtype, eps_k=0.1, erase="none")
    compare("rewrite", tensors, dtype, eps_k=None, erase="none")


@DTYPES
@REWRITES
@pytest.mark.parametrize("options", [{}, {"value_from": "compressed", "value_scale": 4.0}])
def test_read(dtype, rewrites, options):
    tensors = {"state": inputs((2, 40), 63, 4)["state"]}
    tensors |= parameters(63, 4, "channel", 4, rewrites)
    compare("read", tensors | weights(tensors), dtype, **options)


def test_the_results_end_with_alpha():
    """What was there before keeps its place."""
    assert ReadResult._fields[-1] == RewriteReadResult._fields[-1] == "erase"


@REWRITES
def test_an_erasure_like_the_write_is_the_delta_rule(rewrites):
    tensors = inputs((2, 40), 63, 4, rewrites)
    tied = functional.rewrite(**tensors, eps_k=0.1)
    assert_close(
        "state", functional.rewrite(**tensors, erase=tensors["gate"], eps_k=0.1), tied, F64
    )


@DTYPES
@ERASE
def test_closed_gates_keep_each_bit(dtype, erase):
    tensors = {name: tensor.to(dtype) for name, tensor in inputs((2, 40), 63, 4, 2).items()}
    tensors["gate"] = torch.zeros_like(tensors["gate"])
    found = functional.rewrite(
        **tensors, erase=tensors["gate"] if erase == "separate" else erase, eps_k=0.1
    )
    assert torch.equal(found, tensors["state"])


def test_without_erasure_the_state_does_not_reach_other_gradients():
    tensors = {n: t.float().requires_grad_() for n, t in inputs((2, 9), 40, 4).items()}
    infinite = tensors["state"].detach().fill_(torch.inf).requires_grad_()
    functional.rewrite(**tensors | {"state": infinite}, eps_k=0.1, erase="none").sum().backward()
    for name in ("direction", "value", "gate"):
        assert tensors[name].grad.isfinite().all(), name


@ERASE
@pytest.mark.parametrize("compress", ["channel", "token"])
@REWRITES
def test_a_chain_changes_no_bit(erase, compress, rewrites):
    results = []
    for anchor_every in (None, 3):
        torch.manual_seed(0)
        given = inputs((2, 20), 24, 4, rewrites) | parameters(24, 4, compress, 4, rewrites)
        given = {n: t.float().requires_grad_() for n, t in given.items()}
        kinds = (
            {"erase": gate(given), **weights(given)} if erase == "separate" else {"erase": erase}
        )
        state, chain = given.pop("state"), None if anchor_every is None else Chain(anchor_every)
        total = torch.zeros(())
        for _ in range(4):
            if chain is None:
                found = functional.rewrite_read(state, **given, **kinds, eps_k=0.1)
            else:
                found, chain = functional.rewrite_read_chained(
                    state, **given, **kinds, eps_k=0.1, chain=chain
                )
            state = found.state
            total = total + sum(one.square().sum() for one in found[1:] if one is not None)
        total.backward()
        results.append([state, *(tensor.grad for tensor in given.values())])
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other)


def test_a_chain_begins_anew_with_a_rewrite_that_erases_otherwise():
    results = []
    for anchor_every in (1, 4):
        torch.manual_seed(0)
        given = inputs((2, 9), 24, 4) | parameters(24, 4, "channel")
        given = {n: t.requires_grad_() for n, t in given.items() if t is not None}
        state, chain = given.pop("state"), Chain(anchor_every)
        total = torch.zeros((), dtype=F64)
        for erase in ("tied", "tied", "none", "tied", gate(given), gate(given), "none"):
            found, chain = functional.rewrite_read_chained(
                state, **given, eps_k=0.1, erase=erase, chain=chain
            )
            state = found.state
            total = total + found.context.square().sum() + state.square().sum()
        total.backward()
        results.append([tensor.grad for tensor in given.values() if tensor.grad is not None])
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other)


def test_refusals():
    tensors = inputs((2, 9), 8, 2) | parameters(8, 2, "channel")
    write = {name: tensors[name] for name in ("state", "direction", "value", "gate")}
    read = {name: tensors[name] for name in ("state", *[n for n in tensors if n not in write])}
    for given, error, expected in [
        ({"erase": "all"}, ValueError, '`erase` must be "tied", "none" or a tensor, got \'all\''),
        ({"erase": write["gate"][:1]}, ValueError, "`erase` must have shape (2, 9), got (1, 9)"),
        ({"erase": 0.5}, TypeError, '`erase` must be "tied", "none" or a tensor, got 0.5'),
        (
            {"erase": write["gate"].int()},
            TypeError,
            "`erase` must have dtype float32, float64, bfloat16 or float16, got torch.int32",
        ),
        (
            {"erase": write["gate"].to_sparse()},
            TypeError,
            "`erase` must be a dense tensor, got layout torch.sparse_coo",
        ),
        (
            {"erase": write["gate"].float()},
            TypeError,
            "`erase` must have dtype torch.float64, got torch.float32",
        ),
        (
            {"erase": write["gate"], "gate": write["gate"][:1]},
            ValueError,
            "`gate` must have shape (2, 9), got (1, 9)",
        ),
        ({"eps_k": None}, ValueError, NO_EPS),
        ({"eps_k": None, "erase": write["gate"]}, ValueError, NO_EPS),
    ]:
        with refused(error, expected):
            functional.rewrite(**(write | {"eps_k": 0.1} | given))
    weight, bias = tensors["gate_weight"], tensors["gate_bias"]
    alone = "`{}` must come with `{}`, got None for `{}`"
    for given, expected in [
        ({"erase_bias": bias}, alone.format("erase_bias", *["erase_weight"] * 2)),
        ({"erase_weight": weight}, alone.format("erase_weight", *["erase_bias"] * 2)),
        (
            {"erase_weight": weight[:3], "erase_bias": bias},
            "`erase_weight` must have shape (8,), got (3,)",
        ),
        (
            {"erase_weight": weight[:3], "gate_weight": weight[:3], "erase_bias": bias},
            "`gate_weight` must have shape (8,), got (3,)",
        ),
    ]:
        with refused(ValueError, expected):
            functional.read(**(read | given))
    without = {name: tensor for name, tensor in read.items() if not name.startswith("gate")}
    with refused(ValueError, alone.format("erase_weight", *["gate_weight"] * 2)):
        functional.read(**without, erase_weight=weight)


NO_EPS = '`eps_k` must be a number unless erase="none", got None'
