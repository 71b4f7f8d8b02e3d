"""The processes of a run, as torchrun starts them, and what they tell each other.

Each trains on its part of every batch. The first one writes the run directory and speaks to the
user. Without torchrun there is one process, for which nothing here costs anything.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar

import torch
from torch import Tensor

from ddl import environment
from ddl.errors import (
    DivergedError,
    InputError,
    OtherProcessError,
    ProcessError,
    first_line,
)

T = TypeVar("T")

EXPECTED = (InputError, DivergedError, ModuleNotFoundError)  # errors that are a sentence
# How torch's backends say that another process has ended, or does not answer within the time-out.
LOST = re.compile(
    r"gloo|nccl|connection (was )?(closed|reset|refused)|closed by peer|broken pipe|timed? ?out"
    r"|socket|tcpstore|remote process",
    re.IGNORECASE,
)
# How gloo says that this process has no address, as for a wrong GLOO_SOCKET_IFNAME.
NO_ADDRESS = re.compile(r"unable to (find|resolve)|resolve hostname", re.IGNORECASE)


class Processes:
    """The processes that train together.

    rank: the number of this one, from 0. count: of all. local_rank: of this one on its machine.
    timeout: after which a process that waits for another one gives up. All processes must make
    theirs together.
    """

    def __init__(
        self,
        rank: int = 0,
        count: int = 1,
        *,
        local_rank: int = 0,
        timeout: timedelta | None = None,
    ) -> None:
        self.rank, self.count, self.local_rank = rank, count, local_rank
        self.timeout = timeout
        self.group: Any = None  # of torch.distributed, for objects and flags, in the CPU's memory
        if not self.alone:  # a new group does not have the time-out of the first one
            self.group = torch.distributed.new_group(backend="gloo", timeout=timeout)

    @property
    def alone(self) -> bool:
        """Whether this is the only process."""
        return self.count == 1

    @property
    def first(self) -> bool:
        """Whether this process writes the run directory and speaks to the user."""
        return self.rank == 0

    def with_own_group(self) -> Processes:
        """The same processes for another thread, whose messages do not mix with this one's.

        All processes must call it together.
        """
        if self.alone:
            return self
        return Processes(self.rank, self.count, local_rank=self.local_rank, timeout=self.timeout)

    def sum(self, numbers: Tensor) -> Tensor:
        """The sums over the processes, on the numbers' device, where training sums gradients."""
        if not self.alone:
            torch.distributed.all_reduce(numbers)
        return numbers

    def gather(self, value: T) -> list[T]:
        """The values of all processes, in the order of their ranks."""
        if self.alone:
            return [value]
        found: list[Any] = [None] * self.count
        torch.distributed.all_gather_object(found, value, group=self.group)
        return found

    def any(self, flag: bool) -> bool:
        """Whether the flag of any process is true."""
        if self.alone:
            return flag
        flags = torch.tensor(float(flag))
        torch.distributed.all_reduce(flags, group=self.group)
        return bool(flags > 0)

    def from_first(self, make: Callable[[], T]) -> T:
        """Let the first process make something for all. If it fails, the others raise, too."""
        if self.alone:
            return make()
        made: list[Any] = [None, True]
        error: BaseException | None = None
        if self.first:
            try:
                made = [make(), False]
            except Exception as raised:
                error = raised
        torch.distributed.broadcast_object_list(made, src=0, group=self.group)
        value, failed = made
        if failed:
            raise OtherProcessError(0) if error is None else error
        result: T = value
        return result

    @contextmanager
    def together(self) -> Iterator[None]:
        """End the block together with the other processes; if one raises, all do.

        An error that is a sentence is raised by the first process, whichever it happened to.
        """
        error: Exception | None = None
        try:
            yield
        except Exception as raised:
            error = raised
        if self.alone:
            if error is not None:
                raise error
            return
        sentence = error if isinstance(error, EXPECTED) else None
        found = self.gather((error is not None, sentence))
        failed = next((rank for rank, (raised, _) in enumerate(found) if raised), None)
        if error is not None and (self.first or sentence is None):
            raise error
        if failed is not None:
            reason = found[failed][1] if self.first else None
            raise reason or OtherProcessError(failed)


ALONE = Processes()

# DDP's reducer must not be the last to hold gloo's group. It would end the group while it holds the
# GIL, and wait for a thread of gloo that may be waiting for the GIL (torch 2.11).
_kept: list[Any] = []


@contextmanager
def joined(minutes: float) -> Iterator[Processes]:
    """The processes that torchrun has started, this one among them; `ALONE` without torchrun.

    minutes: after which a process that waits for another one gives up. Raises InputError if the
    processes do not find each other, ProcessError if another one ends or does not answer, and for
    an error that this one has alone.
    """
    launched = environment.launched()
    if launched is None or launched.processes == 1:
        yield ALONE
        return
    rank, timeout = launched.rank, timedelta(minutes=minutes)
    try:
        _join(_meet(timeout, launched), timeout, launched)
        _kept.append(torch.distributed.group.WORLD)
        yield Processes(rank, launched.processes, local_rank=launched.local_rank, timeout=timeout)
    except EXPECTED as error:
        if rank == 0:
            raise
        if isinstance(error, DivergedError):  # all have seen the same numbers
            raise OtherProcessError(0) from error
        raise ProcessError(f"process {rank}: {error}") from error
    except RuntimeError as error:  # torch's DistError is one
        if not (isinstance(error, torch.distributed.DistError) or LOST.search(str(error))):
            raise
        raise ProcessError(
            f"process {rank} of {launched.processes} ends, because another one has ended or"
            f" has not answered for {minutes:g} minutes ({first_line(error)}); --resume goes on"
            " from the last checkpoint"
        ) from error
    # After an error nothing is waited for: the process is about to end.
    torch.distributed.destroy_process_group()


def _meet(timeout: timedelta, launched: environment.Launched) -> Any:
    """The store at MASTER_ADDR and MASTER_PORT, by which the processes exchange their addresses."""
    if not torch.distributed.is_available():
        raise InputError("parallel", "come with a torch that has torch.distributed", "one without")
    from torch.distributed.distributed_c10d import PrefixStore
    from torch.distributed.rendezvous import rendezvous

    try:
        store, _, _ = next(rendezvous("env://", timeout=timeout))
    except (RuntimeError, ValueError) as error:
        raise _not_found(launched, error) from error
    # torchrun keeps its store over a restart (torch 2.11), with the addresses of processes that
    # are gone: without a prefix, a new process may read one of them.
    return PrefixStore(f"restart {environment.restarts()}", store)


def _join(store: Any, timeout: timedelta, launched: environment.Launched) -> None:
    gpus = torch.cuda.is_available() and torch.distributed.is_nccl_available()
    try:
        torch.distributed.init_process_group(
            "cpu:gloo,cuda:nccl" if gpus else "gloo",
            store=store,
            rank=launched.rank,
            world_size=launched.processes,
            timeout=timeout,
        )
    except RuntimeError as error:
        if NO_ADDRESS.search(str(error)):
            raise _not_found(launched, error) from error
        raise


def _not_found(launched: environment.Launched, error: Exception) -> InputError:
    return InputError.sentence(
        "the processes of torchrun must find each other at MASTER_ADDR and MASTER_PORT, got in"
        f" process {launched.rank}: {first_line(error)}"
    )
