"""GPUs of different types in one machine: a stand-in for NVIDIA's driver, and the real compiler.

The stand-in refuses code for another architecture and functions of another GPU, as drivers do.
"""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.cuda_host.test_driver import TOKEN_READ, build, run, words
from tests.cuda_host.test_driver import pytestmark as pytestmark  # the same conditions

STEP_ON = "_native.pretend_gpu({})\nstep()\n"
BUILT = re.compile(r"^ddl: (compiled|found) \w+ for sm_(\d+) in ", re.M)


class Process(NamedTuple):
    lines: list[list[str]]  # calls of the driver, in words
    compiled: list[str]  # architectures of the kernels that were not in the cache
    found: list[str]  # of those that were

    def calls(self, name: str, gpu: int) -> list[list[str]]:
        return [line for line in self.lines if line[0] == name and line[3].rstrip(",") == str(gpu)]

    def launches(self, gpu: int) -> list[str]:
        """Kernels, grids, blocks and shared memory, without addresses."""
        lines = self.calls("cuLaunchKernel", gpu)
        return [" ".join(line[1:]).partition(" stream ")[0] for line in lines]

    def architectures(self, gpu: int) -> set[str]:
        return {line[-1] for line in self.calls("cuModuleLoadData", gpu)}


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("driver"))


class Machine(NamedTuple):
    """Two GPUs, and a cache of compiled kernels beside the logs."""

    driver: Path
    folder: Path
    capabilities: str
    d: int

    def in_turn(self) -> Process:
        """Take a step on each GPU, and on each again, in one process."""
        code = TOKEN_READ.format(device=0, d=self.d, stream=0)
        return self.started("turn", code + STEP_ON.format(1) + 2 * "step()\n" + STEP_ON.format(0))

    def ranks(self) -> list[Process]:
        """Take a step in each of two processes at once, as torchrun starts them."""
        code = "import os\n" + TOKEN_READ.format(
            device="int(os.environ['LOCAL_RANK'])", d=self.d, stream=0
        )
        with ThreadPoolExecutor(2) as threads:
            return list(threads.map(lambda rank: self.started(str(rank), code, rank), range(2)))

    def started(self, log: str, code: str, rank: int = 0) -> Process:
        path = self.folder / log
        result = run(
            self.driver,
            ["-c", code],
            path,
            STAND_IN_CAPABILITY=self.capabilities,
            DDL_LOG="debug",
            LOCAL_RANK=str(rank),
        )
        assert result.returncode == 0, result.stderr
        built = BUILT.findall(result.stderr)
        by_origin = {
            origin: [number for how, number in built if how == origin]
            for origin in ("compiled", "found")
        }
        return Process([line.split() for line in path.read_text().splitlines()], **by_origin)


def check_kept_apart(machine: Machine, in_turn: Process, ranks: list[Process]) -> None:
    """Check that each GPU has its own code and plan, whoever else uses the cache or process."""
    for gpu, capability in enumerate(machine.capabilities.split()):
        alone = ranks[gpu]
        assert alone.architectures(gpu) == in_turn.architectures(gpu) == {f"sm_{capability}"}
        assert set(alone.compiled + alone.found) == {capability}
        assert alone.launches(1 - gpu) == []
        assert len(alone.launches(gpu)) >= 3
        times = 2 + gpu  # in turn, GPU 1 takes three steps
        assert in_turn.launches(gpu) == times * alone.launches(gpu)
        assert len(in_turn.calls("cuModuleLoadData", gpu)) == len(
            alone.calls("cuModuleLoadData", gpu)
        ), "loaded once"


def kernels(machine: Machine) -> int:
    return len(list((machine.folder / "kernels").iterdir()))


@pytest.mark.exhaustive
def test_one_process_uses_both_in_turn_before_two_share_its_cache(driver, tmp_path):
    """The plans are alike, so that the kernels' keys differ by the architecture alone."""
    machine = Machine(driver, tmp_path, "80 90", 64)
    in_turn = machine.in_turn()
    assert in_turn.found == []
    assert kernels(machine) == len(in_turn.compiled)
    ranks = machine.ranks()
    assert [rank.compiled for rank in ranks] == [[], []]
    check_kept_apart(machine, in_turn, ranks)


def test_two_processes_fill_the_cache_at_once_before_one_uses_both(driver, tmp_path):
    """One GPU has clusters and more shared memory, and the wide state needs both."""
    machine = Machine(driver, tmp_path, "90 80", 4096)
    ranks = machine.ranks()
    assert [rank.found for rank in ranks] == [[], []]
    in_turn = machine.in_turn()
    assert in_turn.compiled == []
    check_kept_apart(machine, in_turn, ranks)
    for process in (in_turn, *ranks):
        assert process.calls("cuOccupancyMaxActiveClusters", 1) == []
    assert ranks[0].calls("cuOccupancyMaxActiveClusters", 0) != []
    clusters = {
        gpu: {
            words(line, "grid", 2)[1]
            for line in ranks[gpu].calls("cuLaunchKernel", gpu)
            if line[1] in ("rewrite_read_fwd", "rewrite_read_bwd")
        }
        for gpu in (0, 1)
    }
    assert max(clusters[0]) > 1
    assert clusters[1] == {1}
    shared = [words(line, "shared", 1)[0] for line in ranks[1].calls("cuLaunchKernel", 1)]
    assert max(shared) < 164 << 10


@pytest.mark.exhaustive
def test_two_of_one_generation_keep_to_their_own_shared_memory(driver, tmp_path):
    """Code for 8.0 would run on 8.6, which has less shared memory."""
    machine = Machine(driver, tmp_path, "80 86", 8192)
    in_turn, ranks = machine.in_turn(), machine.ranks()
    check_kept_apart(machine, in_turn, ranks)
    most = [
        max(words(line, "shared", 1)[0] for line in in_turn.calls("cuLaunchKernel", gpu))
        for gpu in (0, 1)
    ]
    assert most[1] < 100 << 10 < most[0]
