"""Rewrites that erase nothing, on the emulated GPU."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.emulated_gpu.test_rewrites import PLANS
from tests.ops import test_erase
from tests.ops.test_ops import compare
from tests.support.emulated_device import emulated, needs_emulator
from tests.support.op_cases import BF16, F16, F32, F64, inputs, parameters
from tests.support.sampling import sampled

pytestmark = needs_emulator


@pytest.fixture(autouse=True)
def _emulated() -> Iterator[None]:
    with emulated():
        yield


test_closed_gates = test_erase.test_closed_gates_keep_each_bit
test_a_chain = sampled(test_erase.test_a_chain_changes_no_bit, 1)
test_the_state = test_erase.test_without_erasure_the_state_does_not_reach_other_gradients

READS = pytest.mark.parametrize(("m", "compress"), [(1, "identity"), (4, "channel"), (4, "token")])


@pytest.mark.table(1)
@pytest.mark.parametrize("dtype", [F64, F32, BF16, F16], ids=str)
@READS
@pytest.mark.parametrize("rewrites", [None, 3])
def test_operators(dtype, m, compress, rewrites):
    alone = inputs((2, 9), 100, m, rewrites)
    tensors = alone | parameters(100, m, compress, 4, rewrites)
    compare("rewrite_read", tensors, dtype, eps_k=0.1, erase="none")
    compare("rewrite", alone, dtype, eps_k=0.1, erase="none")


@pytest.mark.table(1)
@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
@READS
def test_any_plan(m, compress, plan):
    tensors = inputs((2, 11), 100, m, 2) | parameters(100, m, compress, 3, 3)
    with emulated(plan=plan | {"THREADS": 32, "CHUNK": 7}):
        compare("rewrite_read", tensors, BF16, eps_k=0.1, erase="none")
