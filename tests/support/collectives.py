"""Counts what the processes of a group tell each other; groups of which one process is real."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

from ddl.lab.train.processes import Processes

KINDS = {"allgather": "gather", "reduce_scatter": "scatter", "allreduce": "reduce"}


class Collectives(TorchDispatchMode):
    """Counts (kind, bytes of the whole tensor) of every collective in the block."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[tuple[str, int]] = Counter()

    def __torch_dispatch__(
        self, call: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if any(kind.__name__ == "DTensor" for kind in types):
            return NotImplemented  # it calls the collectives with plain tensors
        if call.namespace in ("c10d", "_c10d_functional"):
            name = call.__name__.replace("all_", "all")
            for part, kind in KINDS.items():
                if part in name:
                    self.seen[kind, max(map(_bytes, args))] += 1
        return call(*args, **(kwargs or {}))


def _bytes(value: Any) -> int:
    """Bytes of the tensors in an argument: the larger of input and output is the whole one."""
    if isinstance(value, Tensor):
        return value.numel() * value.element_size()
    return sum(map(_bytes, value)) if isinstance(value, list) else 0


@contextmanager
def lonely(count: int) -> Iterator[Processes]:
    """The first process of `count`, without the others: what it gets from them is undefined.

    Sizes are those of a real group. To be called in a process that ends with it.
    """
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=count)
    processes = Processes()
    processes.count, processes.group = count, torch.distributed.group.WORLD
    yield processes
