"""Bytes that the processes of a step tell each other, by formula."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from ddl.lab.config import TrainConfig

from .activations import FLOAT, product_bytes
from .parameters import Group, count, groups, tensors

FLAGS = 3  # that `ddl train` sends with every loss


class Message(NamedTuple):
    """A collective of all processes.

    kind: gather, scatter (reduce-scatter) or reduce (all-reduce). what: group of parameters, norms
    or loss. bytes: of the whole tensor, so of all shards together.
    """

    kind: str
    what: str
    bytes: int

    def sent(self, processes: int) -> float:
        """Bytes that each process sends, and receives, if the processes form a ring.

        A gather passes on all shards but the own, a scatter likewise; an all-reduce is both.
        Source: Patarasu and Yuan, Bandwidth optimal all-reduce algorithms, 2009.
        """
        return (2 if self.kind == "reduce" else 1) * self.bytes * (processes - 1) / processes


def messages(config: TrainConfig, processes: int, *, flags: int = FLAGS) -> list[Message]:
    """The messages of an optimizer step with `config.accumulation` forward passes in all."""
    if processes == 1:
        return []
    loss = Message("reduce", "loss", FLOAT * (1 + flags))
    if config.parallel == "ddp":  # only the last pass of a step sums gradients
        return [Message("reduce", "gradients", FLOAT * count(config.model)), loss]
    passes = config.accumulation // processes
    gathers = list(_gathers(config, processes)) * passes
    scatters = [
        Message("scatter", group.name, FLOAT * group.padded(processes))
        for group in groups(config.model)
    ]
    norms = Message("reduce", "norms", FLOAT * tensors(config.model))  # for clipping
    return [*gathers, *scatters, norms, loss]


def sent(config: TrainConfig, processes: int) -> float:
    """Bytes that each process sends in an optimizer step, in a ring."""
    return sum(message.sent(processes) for message in messages(config, processes))


def gathered_bytes(group: Group, config: TrainConfig, processes: int) -> int:
    """Bytes of a group's parameters in every process while they are gathered."""
    lower = group.name in ("attention", "mlp")
    return (product_bytes(config) if lower else FLOAT) * group.padded(processes)


def _gathers(config: TrainConfig, processes: int) -> Iterator[Message]:
    """Bytes that FSDP2 gathers in a forward and a backward pass: all twice, the embedding once.

    The embedding is in the outermost group, which keeps its parameters until the backward.
    """
    for group in groups(config.model):
        gather = Message("gather", group.name, gathered_bytes(group, config, processes))
        yield from [gather] * (1 if group.name == "embedding" else 2)
