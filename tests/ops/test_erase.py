"""Rewrites that erase and write apart, or erase nothing, against the reference."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from ddl import functional, reference
from ddl.ops.gates import with_erase, write_of
from ddl.results import Chain, ReadParameters, ReadResult, RewriteReadResult
from tests.ops.test_ops import compare, run
from tests.support.op_cases import BF16, F16, F32, F64, inputs, parameters
from tests.support.refused_cases import refused
from tests.support.tolerances import assert_close, compute_dtype

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
@pytest.mark.parametrize("m", [1, 3, 4])
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


@DTYPES
@pytest.mark.parametrize("rewrites", [None, 3])
def test_each_rewrite_of_a_chain_has_an_alpha_of_its_own(dtype, rewrites):
    small, results = compute_dtype(dtype), []
    for anchor_every in (1, 4):
        torch.manual_seed(0)
        read = {n: t.to(dtype) for n, t in parameters(24, 4, "channel").items()}
        state, chain = inputs((2, 9), 24, 4)["state"].to(dtype), Chain(anchor_every)
        leaves, contexts = [state.requires_grad_()], []
        for _ in range(5):
            write = inputs((2, 9), 24, 4, rewrites)
            write = {n: t for n, t in write.items() if n != "state"} | {"erase": gate(write)}
            for name in write:
                write[name] = write[name].to(dtype if name == "direction" else small)
            leaves += [t.requires_grad_() for t in write.values()]
            found, chain = functional.rewrite_read_chained(
                state, **write, **read, eps_k=0.1, chain=chain
            )
            state = found.state
            contexts.append(found.context)
        incoming = [torch.randn_like(context) for context in contexts]
        results.append(torch.autograd.grad(contexts, leaves, incoming))
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other)


@DTYPES
@ERASE
@pytest.mark.parametrize("compress", ["channel", "token"])
@pytest.mark.parametrize("rewrites", [None, 2])
@torch.no_grad()
def test_pieces_erase_as_the_whole_does(dtype, erase, compress, rewrites):
    small = compute_dtype(dtype)
    given = inputs((2, 9), 24, 4, rewrites) | parameters(24, 4, compress, 4, rewrites)
    given = {n: t.to(small if n in ("value", "gate") else dtype) for n, t in given.items()}
    operands = [given.pop(n) for n in ("state", "direction", "value", "gate")]
    alpha = 2 - 0.9 * operands[-1].flip(0) if erase == "separate" else erase
    write = write_of(*operands, 0.1, alpha)
    read = ReadParameters(**given)
    if erase == "separate":
        of_alpha = weights(given)
        read = with_erase(operands[0], read, of_alpha["erase_weight"], of_alpha["erase_bias"])
    whole, _ = functional.step(operands[0], write, read)
    call = functional.bind_cached_step(operands[0], 0.1, write.erase, read)
    along_time = [t.split([4, 1, 1, 3], 1) for t in (*operands[:3], write.gate)]
    pending, pieces = None, []
    for part in zip(*along_time, strict=True):
        *outputs, left = call(*part, pending, None)
        pending = left if compress == "token" else None
        pieces.append(outputs)
    for got, wanted in zip(zip(*pieces, strict=True), whole[:4], strict=True):
        assert torch.equal(torch.cat(got, 1), wanted)


@pytest.mark.parametrize("dtype", [BF16, F16], ids=str)
@pytest.mark.parametrize("erase", ["tied", "none", "separate"])
def test_beside_half_precision_gates_and_values_keep_float32(dtype, erase):
    """Their gradients show it: unlike X', they are not rounded to the state's dtype."""
    tensors = inputs((2, 40), 64, 4, 3)
    tensors |= {"erase": gate(tensors)} if erase == "separate" else {}
    small = [n for n in tensors if n not in ("state", "direction")]
    tensors = {n: t.to(F32 if n in small else dtype) for n, t in tensors.items()}
    incoming, found = torch.randn(tensors["state"].shape).to(dtype), []
    for module in (functional, reference):
        leaves = tensors if module is functional else {n: t.double() for n, t in tensors.items()}
        leaves = {n: t.requires_grad_() for n, t in leaves.items()}
        options = {"eps_k": 0.1} | ({} if "erase" in leaves else {"erase": erase})
        new = module.rewrite(**leaves, **options)
        wanted = [leaves[n] for n in small]
        found.append(torch.autograd.grad(new, wanted, incoming.to(new.dtype)))
        tensors = {n: t.detach() for n, t in tensors.items()}
    for name, actual, expected in zip(small, *found, strict=True):
        assert_close(f"gradient of {name}", actual, expected, F32, gradient=True)


@ERASE
@pytest.mark.parametrize("compress", ["channel", "token"])
def test_results_do_not_depend_on_the_number_of_threads(erase, compress):
    tensors = inputs((2, 500), 64, 4) | parameters(64, 4, compress)
    if erase == "separate":
        tensors |= {"erase": gate(tensors), **weights(tensors)}
    options = {"eps_k": 0.1} | ({} if erase == "separate" else {"erase": erase})
    tensors, runs = {n: t.float() for n, t in tensors.items()}, []
    for threads in (1, 2, 3, 7):
        torch.set_num_threads(threads)
        outputs, gradients = run(functional, "rewrite_read", tensors, F32, **options)
        runs.append([*outputs.values(), *gradients.values()])
    for found in runs[1:]:
        for one, other in zip(runs[0], found, strict=True):
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
