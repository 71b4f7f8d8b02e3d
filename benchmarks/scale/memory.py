"""Memory of a process by formula: what stays for the whole run, and the most in a step."""

from __future__ import annotations

from typing import NamedTuple

from ddl.lab.config import TrainConfig

from .activations import FLOAT, attention, kept, mlp, product_bytes
from .activations import state_bytes as bytes_of_states
from .parameters import channels, count, groups, tensors
from .traffic import gathered_bytes


class State(NamedTuple):
    """Bytes that the first process holds between two steps; the others hold at most as much.

    moments: both of AdamW, and its count of steps for each tensor.
    """

    parameters: int
    gradients: int
    moments: int

    @property
    def all(self) -> int:
        return sum(self)


class Peak(NamedTuple):
    """Bytes at the three moments of a step at which a process may hold most.

    loss: the backward of the cross-entropy, with everything that the forward kept. last: that of
    the last sublayer, just after. first: that of the first sublayer, with almost all gradients.
    """

    loss: int
    last: int
    first: int


def is_sharded(config: TrainConfig, processes: int) -> bool:
    return config.parallel == "fsdp2" and processes > 1


def state(config: TrainConfig, processes: int) -> State:
    """Parameters, their gradients and the optimizer's state, in float32."""
    numbers = count(config.model)
    if is_sharded(config, processes):
        numbers = sum(g.padded(processes) for g in groups(config.model)) // processes
    every = FLOAT * numbers
    return State(every, every, 2 * every + FLOAT * tensors(config.model))


def peak(config: TrainConfig, processes: int = 1, *, gpu: bool = True) -> Peak:
    """The most that a process holds at once: torch's allocator without its gaps, no libraries."""
    model, sharded = config.model, is_sharded(config, processes)
    tokens = config.batch_size * model.block_size
    held, saved = state(config, processes), kept(config, sharded=sharded, gpu=gpu)
    constant, before = held.parameters + held.moments, _gradients_before(config, processes)
    constant += sum(_around(config, processes))
    logits = tokens * model.vocab_size * FLOAT
    embedding = FLOAT * model.vocab_size * model.hidden_size
    of_head = embedding if sharded or not before else 0
    own = _own_weights(config, processes)
    working = own.weights + tokens * _working(config, sharded=sharded, gpu=gpu)
    return Peak(
        # Two gradients of the logits are held at once: of the logarithms, and of their argument.
        loss=constant + before + saved.all + 2 * logits,
        last=constant + before + saved.all - logits + of_head + working,
        first=constant + max(before, held.gradients) + of_head * sharded + working + own.gradients,
    )


def gathered(config: TrainConfig, processes: int) -> int:
    """Bytes that FSDP2 holds beside the shards in a backward pass, at most.

    Embedding and stream, and their gradients; parameters of two sublayers, and the gradients of one
    of them, which are in float32, too, while they are summed over the processes.
    """
    if not is_sharded(config, processes):
        return 0
    return 2 * sum(_around(config, processes)) + sum(_own_weights(config, processes))


def accumulated(config: TrainConfig, processes: int) -> int:
    """Bytes of whole gradients that are held between the forward passes of one step."""
    alone = processes == 1 or is_sharded(config, processes)
    several = config.accumulation > processes
    return FLOAT * count(config.model) if alone and several else 0


def host_bytes(config: TrainConfig) -> int:
    """Bytes of the CPU's memory in which each process builds the model before it is spread."""
    return FLOAT * count(config.model)


class _OwnWeights(NamedTuple):
    """Bytes of a sublayer's weights in its backward, and those of its gradients."""

    weights: int
    gradients: int


def _around(config: TrainConfig, processes: int) -> list[int]:
    """Bytes of the stream and the embedding, which are gathered around the sublayers."""
    if not is_sharded(config, processes):
        return []
    return [gathered_bytes(group, config, processes) for group in groups(config.model)[-2:]]


def _own_weights(config: TrainConfig, processes: int) -> _OwnWeights:
    """Of the larger sublayer, beside the parameters and gradients that stay.

    Sharded: its parameters, and those that are fetched for the next sublayer; gradients as they are
    computed, and in float32. Otherwise what autocast converts again for `recompute`.
    """
    two = groups(config.model)[:2]
    numbers = max(group.numbers for group in two)
    if not is_sharded(config, processes):
        converted = 2 * numbers * (config.recompute and config.precision == "bfloat16")
        return _OwnWeights(2 * converted, 0)
    parameters = [gathered_bytes(group, config, processes) for group in two]
    summed = FLOAT * max(group.padded(processes) for group in two)
    return _OwnWeights(sum(parameters), max(parameters) + summed)


def _gradients_before(config: TrainConfig, processes: int) -> int:
    """Bytes of gradients that are there when the backward starts. DDP keeps its buffers."""
    if config.parallel == "ddp" and processes > 1:
        return state(config, processes).gradients
    return accumulated(config, processes)


def _working(config: TrainConfig, *, sharded: bool, gpu: bool) -> int:
    """Bytes per token while a sublayer goes backward.

    The gradients of the state and of two of the MLP's products; and what is computed again if
    sublayers do not keep it.
    """
    model, s = config.model, product_bytes(config)
    state_gradient = model.hidden_size * channels(model) * bytes_of_states(config)
    again = max(attention(config, sharded=sharded, gpu=gpu), mlp(config)) * config.recompute
    return state_gradient + 2 * model.mlp_hidden * s + again
