"""The emulator runs the blocks of a cluster concurrently, and reports undefined behaviour."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from collections.abc import Sequence

import pytest

from tests.emulator import faults
from tests.emulator.build import build, sanitizer_environment, unsupported
from tests.emulator.launch import LaunchError, Module
from tests.emulator.test_emulator import ORDERS, order
from tests.support import ROOT

__all__ = ["order"]  # a fixture

pytestmark = pytest.mark.skipif(unsupported() is not None, reason=str(unsupported()))

SOURCE = faults.SOURCE.with_name("clusters.cu")
DEFINES = ("THREADS=128",)


@pytest.fixture(scope="module")
def module() -> Module:
    return Module(build(SOURCE, DEFINES))


def run(
    module: Module,
    kernel: str,
    index: int = 0,
    *,
    grid: Sequence[int] = (3, 2),
    block: Sequence[int] = (70,),
    size: int = 1024,
) -> list[float]:
    return faults.run(module, kernel, index, grid=grid, block=block, size=size)


@pytest.mark.usefixtures("order")
@pytest.mark.parametrize("threads", [1, 33, 70, 128])
@pytest.mark.parametrize("os_threads", ["1", "3"])
def test_what_is_given_arrives_behind_the_barrier(module, threads, os_threads, monkeypatch):
    monkeypatch.setenv("DDL_EMULATOR_THREADS", os_threads)
    size = 5 * 8 * threads
    out = run(module, "sum_of_cluster", grid=(5, 8), block=(threads,), size=size)
    for place in range(40):
        blocks = range(place % 8 // 4 * 4, place % 8 // 4 * 4 + 4)
        expected = [3.0 * sum(1000 * b + t for b in blocks) for t in range(threads)]
        assert out[place * threads : (place + 1) * threads] == expected


@pytest.mark.usefixtures("order")
@pytest.mark.parametrize("threads", [1, 33, 70, 128])
@pytest.mark.parametrize("os_threads", ["1", "3"])
def test_what_is_sent_arrives_where_it_is_awaited(module, threads, os_threads, monkeypatch):
    monkeypatch.setenv("DDL_EMULATOR_THREADS", os_threads)
    size = 12 * threads
    out = run(module, "sum_by_st_async", grid=(3, 4), block=(threads,), size=size)
    for place in range(12):
        both = 10.0 * (2 * (place % 4 // 2 * 2) + 1)
        total = sum(2.0 * round_ + both for round_ in range(5))
        assert out[place * threads : (place + 1) * threads] == [total] * threads


@pytest.mark.usefixtures("order")
def test_a_cluster_along_the_first_axis(module):
    out = run(module, "neighbour", grid=(6,), block=(40,), size=240)
    others = [1, 2, 0, 4, 5, 3]
    assert out == [100.0 * others[block] + t for block in range(6) for t in range(40)]


@pytest.mark.usefixtures("order")
def test_a_block_keeps_its_own_barriers(module):
    out = run(module, "own_barriers", size=420)
    assert out == [3.0 * (1 + 2 * (place % 2)) for place in range(6) for _ in range(70)]


REPORTED = {
    "gives_global_memory": "no shared memory that both blocks have, at mapa",
    "block_stays_away": "divergent barrier: ",
    "blocks_at_two_barriers": "not all threads of the cluster reached the same sync_cluster",
    "half_a_block_waits": "deadlock: no thread of the block can go on",
}


@pytest.mark.usefixtures("order")
@pytest.mark.parametrize("kernel", REPORTED)
def test_reports_a_fault_and_goes_on(module, kernel):
    with pytest.raises(LaunchError, match=REPORTED[kernel]):
        run(module, kernel)
    assert run(module, "own_barriers", size=420)[0] == 3.0


WRONG_MBARRIERS = {
    1: "this mbarrier was not initialised, at (st_async|mbarrier_wait)",
    2: "this mbarrier was initialised twice, at mbarrier_init",
    3: "deadlock: no thread of the block can go on",
    4: "deadlock: no thread of the block can go on",
    5: "announced twice, at mbarrier_expect_tx|the block returned before the arrival",
}


@pytest.mark.usefixtures("order")
@pytest.mark.parametrize("index", WRONG_MBARRIERS)
def test_reports_what_is_wrong_with_an_mbarrier(module, index):
    with pytest.raises(LaunchError, match=WRONG_MBARRIERS[index]):
        run(module, "wrong_mbarriers", index)
    assert run(module, "wrong_mbarriers", 0, size=420) == [1.0] * 420


@pytest.mark.parametrize("index", [6, 7], ids=["not awaited", "awaited with a wrong parity"])
def test_some_order_shows_what_has_not_arrived(module, index, monkeypatch):
    shown = []
    for number in ORDERS:
        monkeypatch.setenv("DDL_EMULATOR_ORDER", number)
        try:
            shown.append(any(math.isnan(value) for value in run(module, "wrong_mbarriers", index)))
        except LaunchError as error:
            said = ("before the arrival of what was sent", "has returned from the kernel")
            shown.append(any(reason in str(error) for reason in said))
    assert any(shown)


def test_a_block_waits_for_what_is_sent_to_it(module):
    with pytest.raises(
        LaunchError, match=r"before the arrival of what was sent to it at st_async \("
    ):
        run(module, "sends_to_who_left")


def test_names_where_the_blocks_of_a_cluster_wait(module):
    with pytest.raises(LaunchError) as error:
        run(module, "half_a_block_waits")
    for rank in (0, 1):
        for barrier in ("__syncthreads", "sync_cluster"):
            assert f"block {rank} of the cluster, waiting at {barrier} (" in str(error.value)


@pytest.mark.parametrize("block", [-1, 2])
def test_a_cluster_has_no_more_blocks_than_it_has(module, block):
    with pytest.raises(LaunchError, match=f"the cluster has no block {block}, at mapa"):
        run(module, "gives_to_nobody", block)


@pytest.mark.parametrize(
    ("kernel", "number", "block"),
    [
        ("gives_too_early", "1", "block 0 of the cluster has not begun"),
        ("gives_too_late", "0", "block 0 of the cluster has returned from the kernel"),
    ],
)
def test_some_order_shows_a_block_that_is_not_there(module, kernel, number, block, monkeypatch):
    monkeypatch.setenv("DDL_EMULATOR_ORDER", number)
    with pytest.raises(LaunchError, match=f"{block}, at mapa"):
        run(module, kernel)


def test_some_order_shows_a_missing_barrier(module, monkeypatch):
    wrong = []
    for number in ORDERS:
        monkeypatch.setenv("DDL_EMULATOR_ORDER", number)
        out = run(module, "missing_cluster_barrier", size=420)
        wrong.append(any(math.isnan(value) for value in out))
    assert any(wrong)


@pytest.mark.parametrize(
    ("kernel", "grid", "reason"),
    [
        ("nine_blocks", (1, 9), "a cluster of more than 8 blocks"),
        (
            "own_barriers",
            (4, 3),
            "a grid that is not made of whole clusters of 1 × 2 × 1 blocks",
        ),
    ],
)
def test_refuses_launches_that_a_gpu_refuses(module, kernel, grid, reason):
    with pytest.raises(LaunchError, match=f"{kernel}: invalid launch: {reason}"):
        run(module, kernel, grid=grid)


PROGRAM = """
import sys
from pathlib import Path
from tests.emulator.faults import run
from tests.emulator.launch import Module
run(Module(Path(sys.argv[1])), sys.argv[2], grid=(3, 4), block=(70,), size=840)
"""


@pytest.mark.parametrize(
    ("kernel", "races"),
    [("sum_of_cluster", False), ("sum_by_st_async", False), ("missing_cluster_barrier", True)],
)
def test_thread_sanitizer_sees_what_blocks_exchange(kernel, races):
    library = build(SOURCE, DEFINES, "tsan")
    ran = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(library), kernel],
        env={**os.environ, **sanitizer_environment("tsan"), "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    if "unexpected memory mapping" in ran.stderr:
        pytest.skip("this kernel's address space randomisation is too wide for ThreadSanitizer")
    assert ("data race" in ran.stderr) is races, ran.stderr[-3000:]
    assert (ran.returncode != 0) is races, ran.stderr[-3000:]
