"""Several processes with torchrun's variables, forked from the test: no import has to be paid."""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from functools import cache
from importlib import import_module
from pathlib import Path

import torch
import torch._dynamo  # torch.distributed wants it, and each process would import it
from rich.console import Console

from ddl.lab.cli.main import main
from ddl.lab.config import TrainConfig
from ddl.lab.train import train
from ddl.lab.train.metrics import measured_peak
from ddl.lab.train.saver import versions

SECONDS = 120
LATE = (  # what training imports late
    "matplotlib.pyplot",
    "torch._dynamo",
    "torch.distributed.checkpoint.hf_storage",
    "torch.distributed.checkpoint.state_dict_loader",
    "torch.distributed.checkpoint.state_dict_saver",
    "torch.distributed.fsdp",
    "torch.nn.parallel",
)


class Forked:
    """Processes that each call `act(rank)`, whose result is the exit status; 70 after an error.

    Their output is in `folder`/RANK.txt.
    """

    def __init__(self, count: int, folder: Path, act: Callable[[int], int | None]) -> None:
        _prepare()
        folder.mkdir(exist_ok=True)
        self.folder, self.pids = folder, []
        self.statuses: dict[int, int] = {}  # of those that have ended, by rank
        port = free_port()
        sys.stdout.flush()
        sys.stderr.flush()
        for rank in range(count):
            child = os.fork()
            if child == 0:
                _become(rank, count, port, folder, act)
            self.pids.append(child)

    def wait(self, seconds: float = SECONDS, *, of: Sequence[int] | None = None) -> list[int]:
        """The exit statuses, `of` these ranks or of all; kills all after `seconds`, and raises."""
        wanted = range(len(self.pids)) if of is None else of
        end = time.monotonic() + seconds
        while any(rank not in self.statuses for rank in wanted):
            if time.monotonic() > end:
                self.kill()
                raise TimeoutError(f"processes did not end:\n{self.said()}")
            time.sleep(0.01)
            self._reap(os.WNOHANG)
        return [self.statuses[rank] for rank in wanted]

    def kill(self) -> None:
        """Kill who has not ended."""
        for rank, pid in enumerate(self.pids):
            if rank not in self.statuses:
                os.kill(pid, signal.SIGKILL)
        self._reap(0)

    def _reap(self, options: int) -> None:
        for rank, pid in enumerate(self.pids):
            if rank not in self.statuses and (done := os.waitpid(pid, options))[0]:
                self.statuses[rank] = os.waitstatus_to_exitcode(done[1])

    def said(self, rank: int | None = None) -> str:
        """The output of a process, or of all of them, without what Gloo says in torch 2.10."""
        name = "*" if rank is None else str(rank)
        lines = (
            line
            for path in sorted(self.folder.glob(f"{name}.txt"))
            for line in path.read_text().splitlines(keepends=True)
        )
        return "".join(line for line in lines if not line.startswith("[Gloo] Rank "))


def together(count: int, folder: Path, act: Callable[[int], int | None]) -> Forked:
    """Run `act` in several processes, which all have to succeed."""
    forked = Forked(count, folder, act)
    statuses = forked.wait()
    assert statuses == [0] * count, f"{statuses}\n{forked.said()}"
    return forked


def training(config: TrainConfig) -> Callable[[int], int]:
    """Train in a process, and print as the command does."""
    return lambda rank: train(config, Console(file=sys.stdout, width=200)).status


def command(*arguments: str) -> Callable[[int], int]:
    """The command `ddl` in a process."""
    return lambda rank: main(arguments)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@cache
def _prepare() -> None:
    """Do what every process would do: late imports, asking git, timing a product."""
    for name in LATE:
        import_module(name)
    versions()
    measured_peak("float32")


def _become(
    rank: int, count: int, port: int, folder: Path, act: Callable[[int], int | None]
) -> None:
    """The rest of a forked process's life."""
    status = 70
    try:
        out = os.open(folder / f"{rank}.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(out, 1)
        os.dup2(out, 2)
        sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
        sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
        os.environ.update(
            RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(count),
            MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port),
        )  # fmt: skip
        torch.set_num_threads(1)
        status = act(rank) or 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
