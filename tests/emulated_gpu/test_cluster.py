"""Clusters of blocks that share a token, on the emulated GPU, against the reference in float64."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path

import pytest

from ddl import functional
from tests.emulated_gpu.test_ops import REWRITE, check_any_order, every_plan, plan_of
from tests.emulator.build import KERNELS
from tests.ops import test_ops
from tests.ops.test_ops import compare
from tests.support import emulated_device
from tests.support.emulated_device import emulated, needs_emulator
from tests.support.op_cases import BF16, F16, F32, F64, inputs, parameters

pytestmark = needs_emulator

READS = pytest.mark.parametrize(("m", "compress"), [(1, "identity"), (4, "channel"), (4, "token")])


def check_every_op(d, m, compress, dtype, taps=3):
    tensors = inputs((3, 11), d, m) | parameters(d, m, compress, taps)
    compare("rewrite_read", tensors, dtype, eps_k=0.1)
    compare("read", {n: t for n, t in tensors.items() if n not in REWRITE[1:]}, dtype)
    compare("rewrite", {n: tensors[n] for n in REWRITE}, dtype, eps_k=0.1)


@pytest.mark.table(1)
@pytest.mark.parametrize("dtype", [F64, F32, BF16, F16], ids=str)
@pytest.mark.parametrize(("d", "cluster"), [(2, 2), (63, 3), (100, 4), (96, 8), (384, 2), (768, 4)])
@READS
def test_blocks_of_a_cluster_share_a_token(dtype, m, compress, d, cluster):
    with emulated(plan={"CLUSTER": cluster, "CHUNK": 7}):
        check_every_op(d, m, compress, dtype)


@pytest.mark.table(1)
@every_plan
def test_any_plan_of_a_clusters_blocks(compress, keep, window, sums):
    plan = plan_of(compress, keep, window, sums) | {"CLUSTER": 2, "THREADS": 32}
    with emulated(plan=plan):
        tensors = inputs((3, 11), 200, 4) | parameters(200, 4, compress, 3)
        compare("rewrite_read", tensors, F64, eps_k=0.1)


@pytest.mark.table(1)
@pytest.mark.parametrize(("keep", "stages"), [*itertools.product((0, 1), (0, 1, 2))], ids=str)
@READS
def test_rows_that_travel_ahead_to_a_cluster(m, compress, keep, stages):
    plan = {"CLUSTER": 4, "KEEP_IN_REGISTERS": keep, "STAGES": stages, "THREADS": 32, "CHUNK": 7}
    with emulated(plan=plan):
        check_every_op(304, m, compress, BF16)


@pytest.mark.table(1)
@pytest.mark.parametrize(
    ("cluster", "warps"),
    [
        *itertools.product((2, 8), (1, 2, 3, 7, 8, 12, 16)),
        *itertools.product((3,), (1, 2, 3, 7, 8, 10)),
    ],
)
@pytest.mark.parametrize(("dtype", "m"), [(F64, 1), (F32, 9), (BF16, 21)], ids=str)
def test_clusters_of_any_number_of_warps(dtype, m, cluster, warps):
    check_warps(dtype, m, cluster, warps)


@pytest.mark.parametrize("cluster", [2, 3, 8])
def test_sums_of_more_numbers_than_two_warps_have_lanes(cluster):
    check_warps(BF16, 33, cluster, warps=2)


def check_warps(dtype, m, cluster, warps):
    with emulated(plan={"CLUSTER": cluster, "THREADS": 32 * warps}):
        tensors = inputs((2, 3), 1056, m) | parameters(1056, m, "channel")
        compare("rewrite_read", tensors, dtype, eps_k=0.1)


@pytest.mark.parametrize(
    "plan",
    [
        {"CLUSTER": 3, "THREADS": 352},  # the kernels add up 1,024 threads of such a cluster
        {"CLUSTER": 5, "THREADS": 32},  # of which d is no multiple
    ],
    ids=str,
)
def test_choices_that_leave_no_plan_are_refused(plan):
    tensors = inputs((1, 2), 96, 4)
    refused = pytest.raises(ValueError, match=r"^`DDL_PLAN` leaves no plan for `rewrite_read_fwd`$")
    with emulated(plan=plan), refused:
        functional.rewrite(**{n: tensors[n] for n in REWRITE}, eps_k=0.1)


@pytest.mark.table(1)
@pytest.mark.parametrize("compress", ["channel", "token"])
@pytest.mark.parametrize(("d", "m"), [(4096, 4), (2048, 8), (8192, 2)])
def test_wide_states_are_given_to_clusters(d, m, compress, monkeypatch):
    built: list[str] = []

    def build(_kernels: Path, _sanitizer: str, source: str, defines: Sequence[str]) -> str:
        built.append(f"{source} {' '.join(defines)}")
        return str(emulated_device.build(KERNELS / f"{source}.cu", defines))

    monkeypatch.setattr(emulated_device, "_build", build)
    with emulated(shared_per_block=227 * 1024, cluster=8):
        test_ops.test_wide_states(d, m, compress)
    (backward,) = [line for line in built if line.startswith("rewrite_read_bwd ")]
    assert " CLUSTER=1 " not in backward


@pytest.mark.parametrize("compress", ["identity", "channel", "token"])
def test_results_do_not_depend_on_the_order_of_blocks(compress, monkeypatch):
    with emulated(plan={"CLUSTER": 4}):
        check_any_order(compress, monkeypatch)
