"""Rewrites that erase and write apart, or erase nothing, on the emulated GPU."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.emulated_gpu.test_rewrites import PLANS
from tests.ops import test_erase
from tests.ops.test_erase import gate, weights
from tests.ops.test_ops import compare
from tests.support.emulated_device import emulated, needs_emulator
from tests.support.op_cases import BF16, F16, F32, F64, inputs, parameters
from tests.support.sampling import sampled

pytestmark = needs_emulator


@pytest.fixture(autouse=True)
def _emulated() -> Iterator[None]:
    with emulated():
        yield


test_an_erasure_like_the_write = test_erase.test_an_erasure_like_the_write_is_the_delta_rule
test_closed_gates = test_erase.test_closed_gates_keep_each_bit
test_a_chain = sampled(test_erase.test_a_chain_changes_no_bit, 1)
test_the_state = test_erase.test_without_erasure_the_state_does_not_reach_other_gradients

READS = pytest.mark.parametrize(("m", "compress"), [(1, "identity"), (4, "channel"), (4, "token")])


@pytest.mark.table(1)
@pytest.mark.parametrize("dtype", [F64, F32, BF16, F16], ids=str)
@READS
@pytest.mark.parametrize("rewrites", [None, 3])
@pytest.mark.parametrize("erase", ["none", "k as it is", "separate"])
def test_operators(dtype, m, compress, rewrites, erase):
    tensors = inputs((2, 9), 100, m, rewrites) | parameters(100, m, compress, 4, rewrites)
    options = {"eps_k": 0.1 if erase != "k as it is" else None}
    if erase == "separate":
        tensors |= {"erase": gate(tensors), **weights(tensors)}
    else:
        options["erase"] = "none"
    compare("rewrite_read", tensors, dtype, **options)
    names = ("state", "direction", "value", "gate", "erase")
    alone = {n: tensors[n] for n in names if n in tensors}
    compare("rewrite", alone, dtype, **options)
    compare("read", {n: t for n, t in tensors.items() if n not in names[1:]}, dtype)


@pytest.mark.table(1)
@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
@READS
@pytest.mark.parametrize("erase", ["none", "separate"])
def test_any_plan(m, compress, plan, erase):
    tensors = inputs((2, 11), 100, m, 2) | parameters(100, m, compress, 3, 3)
    options = {"eps_k": 0.1}
    if erase == "separate":
        tensors |= {"erase": gate(tensors), **weights(tensors)}
    else:
        options["erase"] = erase
    with emulated(plan=plan | {"THREADS": 32, "CHUNK": 7}):
        compare("rewrite_read", tensors, BF16, **options)
