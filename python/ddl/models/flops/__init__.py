"""FLOPs per token of every residual and model, one formula per part; imports no torch."""

from __future__ import annotations

from functools import lru_cache

from ddl.options import check_count, check_positive, spread_anchors

from ..config import STREAMS, GPTConfig
from . import parts
from .parts import NOTHING, Flops, rms_norm, shared, work

__all__ = ["Flops", "flops_by_part", "flops_per_token"]


@lru_cache(maxsize=256)
def flops_per_token(
    config: GPTConfig, *, length: int | None = None, keys: float | None = None
) -> Flops:
    """FLOPs per token of the model and its loss, forward and backward, in training.

    length: tokens T of a sequence; None for block_size. keys: keys that a token sees in attention
    on average; None for (T + 1)/2, as causal attention has. torch's FlopCounterMode counts T.
    `recomputed`, which is in no total, is that of a CPU if config.anchor_every is None, so that the
    count depends on the configuration alone: on a CUDA device fewer rewrites are applied again.
    Raises InputError unless `length` is an integer of at least 1.
    """
    return sum(flops_by_part(config, length=length, keys=keys).values(), NOTHING)


def flops_by_part(
    config: GPTConfig, *, length: int | None = None, keys: float | None = None
) -> dict[str, Flops]:
    """The same by part, summed over the layers; parts that the model lacks are left out.

    The parts: embedding, attention, mixers, mlp, head; and of the residual `norms and additions`,
    `reads and additions`, `hyper-connections` (of every kind, gated residuals as well), `attention
    residuals`, or expand, reads, values, gates, directions and rewrites.
    """
    check_count("length", length, optional=True)
    check_positive("keys", keys, optional=True)
    keys = ((length or config.block_size) + 1) / 2 if keys is None else keys
    d, layers, mixing = config.hidden_size, config.num_layers, len(config.mixing_layers)
    width = config.num_heads * config.head_dim
    every = {
        "embedding": work(0, 0, d),  # a row of a table, to whose gradient it is added
        "attention": (layers - mixing) * parts.attention(d, width, config.num_heads, keys),
        "mixers": mixing * parts.mixer(config) if mixing else NOTHING,
        "mlp": layers * parts.swiglu(d, config.mlp_hidden),
        **_residual(config),
        "head": parts.head(d, config.vocab_size),
    }
    return {name: flops for name, flops in every.items() if flops != NOTHING}


def _residual(config: GPTConfig) -> dict[str, Flops]:
    if config.residual in STREAMS:
        return _stream(config)
    d, sublayers, n = config.hidden_size, 2 * config.num_layers, config.value_channels
    norm, repeated = rms_norm(d), parts.expand(d, n, "repeat", 1)
    match config.residual:
        case "additive":
            return {"norms and additions": sublayers * parts.addition(d) + norm}
        case "additive-conv":
            read = parts.read(d, 1, "token", config.compress_kernel_size)
            return {"reads and additions": (sublayers + 1) * read + sublayers * work(0, d, d)}
        case "expanded":
            reads = (sublayers + 1) * parts.read(d, n, "channel", 1)
            added = sublayers * parts.weighted_addition(d, n)
            return {"reads and additions": reads + added + repeated}
        case "attention-residual":
            of_all = parts.attention_residual(d, sublayers, config.summed_sublayers)
            return {"attention residuals": of_all + norm}
        case "hc":
            connection, end = parts.hyper_connection(d, n), work(0, n * d) + norm
        case "mhc":
            connection, end = parts.manifold_connection(d, n), parts.weighted_read(d, n) + norm
        case "independent-hc":
            connection, end = parts.independent_connection(d, n), parts.weighted_read(d, n) + norm
        case _:
            rank = config.gated_size
            connection, end = parts.gated_connection(d, n, rank), parts.gated_read(d, n, rank)
    return {"hyper-connections": sublayers * connection + end + repeated}


def _stream(config: GPTConfig) -> dict[str, Flops]:
    """The parts of a delta stream: L sublayers have L + 1 reads, the last of them the readout."""
    d, sublayers, n = config.hidden_size, 2 * config.num_layers, config.rewrites
    m = 1 if config.residual == "ddl" else config.value_channels
    compress, expand = STREAMS[config.residual]
    anchors = config.anchor_every or spread_anchors(sublayers, m)
    again = (parts.recomputed(d, m, n, compress, i % anchors) for i in range(sublayers))
    one_read = parts.read(d, m, compress, config.compress_kernel_size)
    return {
        "expand": parts.expand(d, m, expand, config.expand_kernel_size),
        # A state is read and rewritten: two gradients.
        "reads": (sublayers + 1) * one_read + sublayers * shared(d * m),
        "values": sublayers * _values(config, d, m),
        "gates": sublayers * _gates(config, d, m),
        "directions": sublayers * _directions(config, d, m),
        "rewrites": sum(again, sublayers * parts.rewrite(d, m, n, erase=config.erase)),
    }


def _values(config: GPTConfig, d: int, m: int) -> Flops:
    if config.value == "constant":
        return NOTHING
    read = config.mapping == "k"  # else of a sublayer's output, which has no other user
    squashed = config.value == "sigmoid"
    return parts.values(d, config.rewrites * m, sigmoid=squashed, bias=read) + shared(d * read)


def _gates(config: GPTConfig, d: int, m: int) -> Flops:
    number, source = config.rewrites, config.gate_from
    if config.gate == "linear" and source == "context":
        return parts.gates(d, number) + shared(d)
    hidden = config.gate_hidden if config.gate == "mlp" else None
    gates = parts.projected_gates(d * m if source == "flatten" else d, number, hidden)
    if source == "context":
        return gates + shared(d)
    return gates + parts.pool(d, m, source, config.gate_kernel_size) + shared(d * m)


def _directions(config: GPTConfig, d: int, m: int) -> Flops:
    if config.mapping == "k":
        return parts.further_directions(d, config.rewrites, config.direction_rank)
    kind = config.direction
    of_context = d if kind in ("linear", "attention") else 0
    of_state = 0 if kind == "linear" else d * m
    return parts.direction(d, m, kind, config.direction_hidden) + shared(of_context + of_state)
