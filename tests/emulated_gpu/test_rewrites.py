"""Several rewrites between two reads, on the emulated GPU."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.ops import test_rewrites
from tests.ops.test_ops import compare
from tests.support.emulated_device import emulated, needs_emulator
from tests.support.op_cases import BF16, F16, F32, F64, inputs, parameters
from tests.support.sampling import sampled

pytestmark = needs_emulator


@pytest.fixture(autouse=True)
def _emulated() -> Iterator[None]:
    with emulated():
        yield


test_an_axis_of_one = sampled(test_rewrites.test_an_axis_of_one_changes_no_bit, 1)
test_as_many_as_before = sampled(test_rewrites.test_as_many_as_before_need_not_come, 1)
test_gates_or_values_may_be_absent = test_rewrites.test_gates_or_values_may_be_absent
test_parallel_directions = test_rewrites.test_parallel_directions_write_one_after_the_other
test_shut_gates = test_rewrites.test_shut_gates_keep_the_state_bit_for_bit
test_two_reflections = test_rewrites.test_two_reflections_are_a_rotation

READS = pytest.mark.parametrize(("m", "compress"), [(1, "identity"), (4, "channel"), (4, "token")])


@pytest.mark.table(1)
@pytest.mark.parametrize("dtype", [F64, F32, BF16, F16], ids=str)
@READS
@pytest.mark.parametrize("rewrites", [2, 3, 8])
def test_rewrite_read(dtype, m, compress, rewrites):
    tensors = inputs((2, 9), 100, m, rewrites) | parameters(100, m, compress, 4, rewrites)
    compare("rewrite_read", tensors, dtype, eps_k=0.1)
    alone = {n: t for n, t in tensors.items() if n not in ("direction", "value", "gate")}
    compare("read", alone, dtype)
    alone = {n: tensors[n] for n in ("state", "direction", "value", "gate")}
    compare("rewrite", alone, dtype, eps_k=0.1)


PLANS = {
    "re-read": {"KEEP_IN_REGISTERS": 0, "STAGES": 0},
    "re-read, two stages": {"KEEP_IN_REGISTERS": 0, "STAGES": 2},
    "two stages": {"KEEP_IN_REGISTERS": 1, "STAGES": 2},
    "loads ahead": {"STAGES": 0, "LOAD_AHEAD": 2},
    "sums in registers": {"SUMS": 0},
    "separate sums": {"SUMS": 3},
}


@pytest.mark.table(1)
@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
@READS
@pytest.mark.parametrize("dtype", [F64, BF16], ids=str)
def test_any_plan(dtype, m, compress, plan):
    with emulated(plan=plan | {"THREADS": 32, "CHUNK": 7}):
        tensors = inputs((3, 11), 100, m, 2) | parameters(100, m, compress, 3, 3)
        compare("rewrite_read", tensors, dtype, eps_k=0.1)


@pytest.mark.parametrize("dtype", [F64, BF16], ids=str)
def test_a_cluster(dtype):
    with emulated(cluster=4, plan={"CLUSTER": 2, "THREADS": 32}):
        tensors = inputs((2, 9), 128, 4, 2) | parameters(128, 4, "token", 3, 2)
        compare("rewrite_read", tensors, dtype, eps_k=0.1)
