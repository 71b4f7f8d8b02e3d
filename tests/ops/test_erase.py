"""Rewrites that erase nothing, against the reference."""

from __future__ import annotations

import pytest
import torch

from ddl import functional, reference
from ddl.results import Chain, ReadParameters, Write
from tests.ops.test_ops import compare, run
from tests.support.op_cases import BF16, F16, F32, F64, inputs, parameters
from tests.support.refused_cases import refused
from tests.support.tolerances import assert_close, compute_dtype

DTYPES = pytest.mark.parametrize("dtype", [F64, F32, BF16, F16], ids=str)
READS = pytest.mark.parametrize(
    ("m", "compress"), [(1, "identity"), (3, "channel"), (4, "channel"), (4, "token")]
)
REWRITES = pytest.mark.parametrize("rewrites", [None, 1, 3])


@pytest.mark.table
@DTYPES
@READS
@REWRITES
def test_rewrite_read(dtype, m, compress, rewrites):
    tensors = inputs((2, 40), 63, m, rewrites) | parameters(63, m, compress, 4, rewrites)
    compare("rewrite_read", tensors, dtype, eps_k=0.1, erase="none")


@DTYPES
@REWRITES
@pytest.mark.parametrize("m", [1, 3, 4])
@pytest.mark.parametrize("d", [63, 384])
def test_rewrite(dtype, m, d, rewrites):
    tensors = inputs((2, 40), d, m, rewrites)
    compare("rewrite", tensors, dtype, eps_k=0.1, erase="none")


@DTYPES
@pytest.mark.parametrize("erase", ["tied", "none"])
def test_closed_gates_keep_each_bit(dtype, erase):
    tensors = {name: tensor.to(dtype) for name, tensor in inputs((2, 40), 63, 4, 2).items()}
    tensors["gate"] = torch.zeros_like(tensors["gate"])
    found = functional.rewrite(**tensors, erase=erase, eps_k=0.1)
    assert torch.equal(found, tensors["state"])


def test_without_erasure_the_state_does_not_reach_other_gradients():
    tensors = {n: t.float().requires_grad_() for n, t in inputs((2, 9), 40, 4).items()}
    infinite = tensors["state"].detach().fill_(torch.inf).requires_grad_()
    functional.rewrite(**tensors | {"state": infinite}, eps_k=0.1, erase="none").sum().backward()
    for name in ("direction", "value", "gate"):
        assert tensors[name].grad.isfinite().all(), name


@pytest.mark.parametrize("compress", ["channel", "token"])
@REWRITES
def test_a_chain_changes_no_bit(compress, rewrites):
    results = []
    for anchor_every in (None, 3):
        torch.manual_seed(0)
        given = inputs((2, 20), 24, 4, rewrites) | parameters(24, 4, compress, 4, rewrites)
        given = {n: t.float().requires_grad_() for n, t in given.items()}
        kinds = {"erase": "none"}
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
        for erase in ("tied", "tied", "none", "tied", "none", "none", "tied"):
            found, chain = functional.rewrite_read_chained(
                state, **given, eps_k=0.1, erase=erase, chain=chain
            )
            state = found.state
            total = total + found.context.square().sum() + state.square().sum()
        total.backward()
        results.append([tensor.grad for tensor in given.values() if tensor.grad is not None])
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other)


@DTYPES
@pytest.mark.parametrize("compress", ["channel", "token"])
@pytest.mark.parametrize("rewrites", [None, 2])
@torch.no_grad()
def test_pieces_erase_as_the_whole_does(dtype, compress, rewrites):
    small = compute_dtype(dtype)
    given = inputs((2, 9), 24, 4, rewrites) | parameters(24, 4, compress, 4, rewrites)
    given = {n: t.to(small if n in ("value", "gate") else dtype) for n, t in given.items()}
    operands = [given.pop(n) for n in ("state", "direction", "value", "gate")]
    write, read = Write(*operands[1:], 0.1, "none"), ReadParameters(**given)
    whole, _ = functional.step(operands[0], write, read)
    along_time = [t.split([4, 1, 1, 3], 1) for t in (*operands[:3], write.gate)]
    pending, pieces = None, []
    for part in zip(*along_time, strict=True):
        piece = Write(*part[1:], 0.1, "none")
        outputs, pending = functional.step(part[0], piece, read, pending=pending, continues=True)
        assert (pending is not None) == (compress == "token")
        pieces.append(outputs)
    for got, wanted in zip(zip(*pieces, strict=True), whole, strict=True):
        assert torch.equal(torch.cat(got, 1), wanted)


@pytest.mark.parametrize("dtype", [BF16, F16], ids=str)
@pytest.mark.parametrize("erase", ["tied", "none"])
def test_beside_half_precision_gates_and_values_keep_float32(dtype, erase):
    """Their gradients show it: unlike X', they are not rounded to the state's dtype."""
    tensors = inputs((2, 40), 64, 4, 3)
    small = [n for n in tensors if n not in ("state", "direction")]
    tensors = {n: t.to(F32 if n in small else dtype) for n, t in tensors.items()}
    incoming, found = torch.randn(tensors["state"].shape).to(dtype), []
    for module in (functional, reference):
        leaves = tensors if module is functional else {n: t.double() for n, t in tensors.items()}
        leaves = {n: t.requires_grad_() for n, t in leaves.items()}
        new = module.rewrite(**leaves, eps_k=0.1, erase=erase)
        wanted = [leaves[n] for n in small]
        found.append(torch.autograd.grad(new, wanted, incoming.to(new.dtype)))
        tensors = {n: t.detach() for n, t in tensors.items()}
    for name, actual, expected in zip(small, *found, strict=True):
        assert_close(f"gradient of {name}", actual, expected, F32, gradient=True)


@pytest.mark.parametrize("compress", ["channel", "token"])
def test_results_do_not_depend_on_the_number_of_threads(compress):
    tensors = inputs((2, 500), 64, 4) | parameters(64, 4, compress)
    options = {"eps_k": 0.1, "erase": "none"}
    tensors, runs = {n: t.float() for n, t in tensors.items()}, []
    for threads in (1, 2, 3, 7):
        torch.set_num_threads(threads)
        outputs, gradients = run(functional, "rewrite_read", tensors, F32, **options)
        runs.append([*outputs.values(), *gradients.values()])
    for found in runs[1:]:
        for one, other in zip(runs[0], found, strict=True):
            assert torch.equal(one, other)


@pytest.mark.parametrize("module", [functional, reference])
def test_refusals(module):
    tensors = inputs((2, 9), 8, 2)
    with refused(ValueError, '`erase` must be "tied" or "none", got \'all\''):
        module.rewrite(**tensors, eps_k=0.1, erase="all")
