"""The emulator runs correct kernels as CUDA does, and reports undefined behaviour."""

from __future__ import annotations

import ctypes
import math
import re
import signal
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from tests.emulator.build import build, unsupported
from tests.emulator.faults import DEFINES, SOURCE, UNWRITTEN, Argument, line_of, run
from tests.emulator.launch import LaunchError, Module
from tests.emulator.memory import guarded, guarded_copy
from tests.support import ROOT

pytestmark = pytest.mark.skipif(unsupported() is not None, reason=str(unsupported()))

ORDERS = ["0", "1", "2", "31"]


class Pointer(ctypes.Structure):
    _fields_ = (("out", ctypes.c_void_p),)


@pytest.fixture(scope="module")
def module() -> Module:
    return Module(build(SOURCE, DEFINES))


@pytest.fixture(params=ORDERS)
def order(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("DDL_EMULATOR_ORDER", request.param)
    return str(request.param)


def nan_positions(values: Sequence[float]) -> list[int]:
    return [i for i, value in enumerate(values) if math.isnan(value)]


# --- correct kernels ----------------------------------------------------------------------------


@pytest.mark.usefixtures("order")
@pytest.mark.parametrize("block", [(32,), (96,), (1024,), (8, 4, 3), (1, 1, 64)])
def test_sums_over_a_block(module: Module, block: tuple[int, ...]) -> None:
    threads = math.prod(block)
    out = run(module, "sum_of_block", grid=(3,), block=block, size=3 * threads + 1)
    assert out == [threads * (threads - 1) / 2] * (3 * threads) + [UNWRITTEN]


@pytest.mark.usefixtures("order")
@pytest.mark.parametrize("threads", [1, 31, 32, 33, 1000, 1024])
def test_reverses_through_dynamic_shared_memory(module: Module, threads: int) -> None:
    blocks = 2 * 3 * 2
    out = run(
        module,
        "reverse",
        grid=(2, 3, 2),
        block=(threads,),
        size=blocks * threads,
        shared_bytes=4 * threads,
    )
    assert out == [1000 * b + threads - t for b in range(blocks) for t in range(threads)]


@pytest.mark.usefixtures("order")
@pytest.mark.parametrize("threads", [1, 2, 31, 32, 33, 70, 128, 1023])
def test_lanes_exchange_values(module: Module, threads: int) -> None:
    assert run(module, "lanes", block=(threads,), size=threads) == [1.0] * threads


@pytest.mark.usefixtures("order")
def test_syncwarp_orders_the_lanes_of_its_mask(module: Module) -> None:
    out = run(module, "warp_neighbours", block=(128,), size=128)
    assert out == [float((t ^ 1) + 2) for t in range(128)]


@pytest.mark.usefixtures("order")
def test_copies_arrive_when_they_are_awaited(module: Module) -> None:
    assert run(module, "copied_ahead", block=(64,), size=256) == [float(i + 1) for i in range(256)]


@pytest.mark.usefixtures("order")
@pytest.mark.parametrize("threads", [32, 96, 128])
def test_a_ring_of_bulk_copies(module: Module, threads: int) -> None:
    out = run(module, "ring", block=(threads,), size=5 * threads + 4, fill=1.5)
    assert out == [3.0] * (5 * threads) + [1.5] * 4


@pytest.mark.parametrize("threads", ["1", "3"])
def test_blocks_share_the_work_of_several_os_threads(
    module: Module, threads: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DDL_EMULATOR_THREADS", threads)
    assert run(module, "count_threads", grid=(50,), size=2) == [50 * 128 + UNWRITTEN, UNWRITTEN]
    assert run(module, "sum_of_block", grid=(50,), size=50 * 128) == [8128.0] * (50 * 128)
    with pytest.raises(LaunchError, match=r"null_pointer, block \(2, 0, 0\), thread \(5, 0, 0\)"):
        run(module, "null_pointer", grid=(50,))


def test_blocks_run_at_once(module: Module, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DDL_EMULATOR_THREADS", "3")
    out = run(module, "blocks_meet", grid=(3,), block=(1,), size=4, fill=0.0)
    assert out == [3.0, 3.0, 3.0, 3.0]


def test_launches_of_several_threads_wait_for_each_other(module: Module) -> None:
    def both(_: int) -> list[float]:
        with pytest.raises(LaunchError, match="null_pointer"):
            run(module, "null_pointer", grid=(3,))
        return run(module, "sum_of_block", size=128)

    with ThreadPoolExecutor(4) as pool:
        assert all(out == [8128.0] * 128 for out in pool.map(both, range(40)))


def tickets(module: Module, order: str, monkeypatch: pytest.MonkeyPatch) -> list[list[float]]:
    """Return the tickets that two blocks of 64 threads drew at the start and after a barrier."""
    monkeypatch.setenv("DDL_EMULATOR_ORDER", order)
    _, *out = run(module, "tickets", grid=(2,), block=(64,), size=257, fill=0.0)
    assert sorted(out) == list(range(256))
    return [out[::2], out[1::2]]


def test_orders_differ(module: Module, monkeypatch: pytest.MonkeyPatch) -> None:
    began, went_on = tickets(module, "0", monkeypatch)
    assert began == [*range(64), *range(128, 192)]
    assert went_on == [*range(64, 128), *range(192, 256)]
    began, went_on = tickets(module, "1", monkeypatch)
    assert began == sorted(began, reverse=True)
    # The last warp of the last block passed its barrier before any other warp began.
    assert sorted(began[96:] + went_on[96:]) == list(range(64))
    for values in tickets(module, "2", monkeypatch):
        assert values != sorted(values)
        assert values != sorted(values, reverse=True)


def test_a_seed_repeats_its_order(module: Module, monkeypatch: pytest.MonkeyPatch) -> None:
    def run_with(seed: str) -> list[float]:
        monkeypatch.setenv("DDL_EMULATOR_ORDER", seed)
        return run(module, "missing_second_barrier")  # the result depends on the order

    assert run_with("7") == run_with("7")
    assert run_with("7") != run_with("8")


# --- faults -------------------------------------------------------------------------------------


REPORTED = {
    "some_threads_at_barrier": (0, "divergent barrier"),
    "two_barriers": (0, "divergent barrier"),
    "barrier_after_return": (0, "divergent barrier"),
    "half_a_warp_shuffles": (0, "deadlock"),
    "two_shuffles": (0, "divergent warp"),
    "exited_lane": (0, "mask names lanes that returned|returned from the kernel: 1 "),
    "lane_not_in_mask": (0, "the calling lane is not in its own mask"),
    "source_not_in_mask": (0, "reads lane 16, which does not take part"),
    "write_at_index": (1 << 40, "thread .3, 0, 0.: illegal memory access"),
    "read_at_index": (-(1 << 40), "thread .3, 0, 0.: illegal memory access"),
    "dynamic_at_index": (1024, "past the end of shared memory"),
    "static_at_index": (8, "index 8 outside of its array"),
    "static_pointer_at_index": (8, "past the end of shared memory"),
    "local_at_index": (-1, "index -1 outside of its array"),
    "misaligned_16": (2, "misaligned access: the address must be a multiple of 16"),
    "misaligned_8": (1, "misaligned access: the address must be a multiple of 8"),
    "null_pointer": (0, "block .2, 0, 0., thread .5, 0, 0.: illegal memory access"),
    "divide_by": (0, "integer division by zero"),
    "shift_by": (32, "shift"),
    "copy_left_behind": (0, "returned before awaiting the copy of cp_async"),
    "copy_to_index": (1024, "past the end of shared memory"),
    "copy_to_global": (0, "the copy goes past dynamic shared memory"),
    "copy_misaligned": (1, "misaligned access: the address must be a multiple of 16"),
    "prefetch_l2_index": (1 << 40, "thread .3, 0, 0.: illegal memory access"),
    "stack_overflow": (10_000, "stack overflow"),
    "trap": (0, "__trap"),
    "too_many_threads": (0, "a block of 1024 threads, but __launch_bounds__ says 512"),
    "too_much_static": (0, "more than 48 KiB"),
}


@pytest.mark.usefixtures("order")
@pytest.mark.parametrize("kernel", REPORTED)
def test_reports_a_fault_and_goes_on(module: Module, kernel: str) -> None:
    index, message = REPORTED[kernel]
    threads = 1024 if kernel == "too_many_threads" else 128
    with pytest.raises(LaunchError, match=f"^{kernel}[,:]") as error:
        run(module, kernel, index, grid=(3,), block=(threads,))
    assert re.search(message, str(error.value)), str(error.value)
    assert run(module, "sum_of_block", size=128) == [8128.0] * 128


def test_names_the_line_of_every_waiting_thread(module: Module) -> None:
    with pytest.raises(LaunchError) as error:
        run(module, "half_a_warp_shuffles")
    barrier = line_of("__syncthreads();  // half of each warp is here")
    name = "tests/emulator/faults.cu"
    assert f"__syncthreads ({name}:{barrier}): 64 threads (16, 17, 18," in str(error.value)
    assert f"__shfl_xor_sync ({name}h:" in str(error.value)


@pytest.mark.usefixtures("order")
@pytest.mark.parametrize(
    ("kernel", "expected"),
    [("unwritten_static", 7), ("unwritten_dynamic", 135), ("copy_not_awaited", 7)],
)
def test_unwritten_shared_memory_is_nan(module: Module, kernel: str, expected: int) -> None:
    assert nan_positions(run(module, kernel, grid=(2,))) == [expected]


@pytest.mark.parametrize("kernel", ["missing_barrier", "missing_second_barrier"])
def test_some_order_shows_a_missing_barrier(
    module: Module, kernel: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    results = set()
    for order in ORDERS:
        monkeypatch.setenv("DDL_EMULATOR_ORDER", order)
        results.add(repr(run(module, kernel)))
    assert len(results) > 1


BULK_COPIES = {
    1: "no place in the block's shared memory, at cp_async_bulk",
    2: "past the end of shared memory",
    3: "misaligned access: the address must be a multiple of 16",
    4: "misaligned access: the address must be a multiple of 16",
    5: "copies a multiple of 16 bytes",
    6: "no place in the block's shared memory, at cp_async_bulk",
    7: r"returned before the arrival of what was sent to it at cp_async_bulk \(",
}


@pytest.mark.usefixtures("order")
@pytest.mark.parametrize("index", BULK_COPIES)
def test_reports_a_wrong_bulk_copy(module: Module, index: int) -> None:
    with pytest.raises(LaunchError, match=BULK_COPIES[index]):
        run(module, "bulk_copies", index)
    out = run(module, "bulk_copies", 0, size=512, fill=2.0)
    assert out == [3.0] * 8 + [0.0] * 120 + [2.0] * 384


RINGS = {
    1: "deadlock",  # an announcement is missing
    2: "deadlock",  # more bytes are announced than copied
    3: "returned before the arrival",  # no wait
    4: "returned before the arrival",  # the parity does not change
    5: "returned before the arrival",  # the parity is the other one
}


@pytest.mark.usefixtures("order")
@pytest.mark.parametrize("index", RINGS)
def test_every_order_shows_a_wrong_ring(module: Module, index: int) -> None:
    with pytest.raises(LaunchError, match=RINGS[index]):
        run(module, "ring", index, block=(96,), size=484, fill=1.5)


@pytest.mark.usefixtures("order")
def test_every_order_shows_a_stage_that_not_all_have_read(module: Module) -> None:
    assert nan_positions(run(module, "ring", 6, block=(96,), size=484, fill=1.5))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"block": (1025,)}, "1025 × 1 × 1 threads"),
        ({"block": (1, 1, 65)}, "1 × 1 × 65 threads"),
        ({"block": (0,)}, "0 × 1 × 1 threads"),
        ({"grid": (0,)}, "0 × 1 × 1 blocks"),
        ({"grid": (1, 65536)}, "1 × 65536 × 1 blocks"),
        ({"shared_bytes": 227 * 1024 + 1}, "232449 bytes of shared memory"),
    ],
)
def test_refuses_launches_that_a_gpu_refuses(
    module: Module, options: dict[str, object], message: str
) -> None:
    with pytest.raises(LaunchError, match=f"reverse: invalid launch: .*{message}"):
        run(module, "reverse", **options)  # type: ignore[arg-type]


def test_knows_the_size_of_the_argument(module: Module) -> None:
    assert module.argument_bytes("reverse") == ctypes.sizeof(Argument) == 16
    with pytest.raises(TypeError, match="`argument` of reverse must have 16 bytes, got 8"):
        module.launch("reverse", (1,), (1,), Pointer())


@pytest.mark.parametrize(("blocks", "when"), [(3000, "after"), (10_000_000, "during")])
def test_faults_outside_of_kernels_stay_fatal(blocks: int, when: str) -> None:
    code = """
import ctypes, sys, threading, time
from tests.emulator.faults import *

def launch():
    run(Module(Path(sys.argv[1])), "count_threads", grid=(int(sys.argv[2]),))

threads = [threading.Thread(target=launch, daemon=True) for _ in range(4)]
for thread in threads:
    thread.start()
time.sleep(0.1)
if sys.argv[3] == "after":
    for thread in threads:
        thread.join()
ctypes.string_at(0)
"""
    command = [sys.executable, "-c", code, str(build(SOURCE, DEFINES)), str(blocks), when]
    result = subprocess.run(command, cwd=ROOT, check=False, timeout=30)
    assert result.returncode == -signal.SIGSEGV


# --- guarded memory -----------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("shape", [(1,), (3, 5), (63,), (2, 1024, 3)])
@pytest.mark.parametrize("alignment", [16, None])
def test_guarded_tensors_start_as_nan(
    dtype: torch.dtype, shape: tuple[int, ...], alignment: int | None
) -> None:
    tensor = guarded(shape, dtype, alignment or dtype.itemsize)
    assert tensor.shape == shape
    assert tensor.dtype == dtype
    assert tensor.isnan().all()
    assert tensor.data_ptr() % (alignment or dtype.itemsize) == 0
    end = tensor.data_ptr() + tensor.nbytes
    assert -end % 4096 < (alignment or 1)  # the page that faults begins there


def test_guarded_copies_keep_their_values() -> None:
    values = torch.randn(7, 4)
    copy = guarded_copy(values.T)
    assert copy.is_contiguous()
    assert torch.equal(copy, values.T)
    assert guarded((0, 4), torch.float32).shape == (0, 4)


@pytest.mark.parametrize("kernel", ["write_at_index", "read_at_index"])
def test_leaving_guarded_memory_fails_the_launch(module: Module, kernel: str) -> None:
    out = guarded((1000,), torch.float32)
    module.launch(kernel, (1,), (128,), Argument(out.data_ptr(), 999))
    for index in (1000, -4096 // 4):
        with pytest.raises(LaunchError, match="illegal memory access"):
            module.launch(kernel, (1,), (128,), Argument(out.data_ptr(), index))
