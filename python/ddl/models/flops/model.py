"""FLOPs per token of a whole model, by part."""

from __future__ import annotations

from functools import lru_cache, reduce
from operator import add

from ddl.options import check_count, check_positive, spread_anchors

from ..config import STREAMS, GPTConfig
from . import baselines, residuals
from .count import NOTHING, Flops, elementwise
from .mixers import mixer
from .sublayers import attention, embedding, head, rms_norm, swiglu

__all__ = ["flops_by_part", "flops_per_token"]


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
    return reduce(add, flops_by_part(config, length=length, keys=keys).values())


def flops_by_part(
    config: GPTConfig, *, length: int | None = None, keys: float | None = None
) -> dict[str, Flops]:
    """The same by part, summed over the layers; parts that the model lacks are left out.

    The parts: embedding, attention, mixers, mlp, head; and of the residual `norms and additions`,
    `reads and additions`, `hyper-connections` (of every kind, gated residuals as well), `attention
    residuals`, or expand, reads, values, gates, directions and rewrites.
    """
    check_count("length", length, optional=True)
    check_positive("keys", 1.0 if keys is None else keys)
    return dict(_parts(config, length, keys))


@lru_cache(maxsize=256)
def _parts(config: GPTConfig, length: int | None, keys: float | None) -> dict[str, Flops]:
    keys = ((length or config.block_size) + 1) / 2 if keys is None else keys
    d, layers = config.hidden_size, config.num_layers
    width, attending = config.num_heads * config.head_dim, layers - len(config.mixing_layers)
    parts = {
        "embedding": embedding(d),
        "attention": attending * attention(d, width, config.num_heads, keys),
        "mixers": len(config.mixing_layers) * mixer(config) if config.mixing_layers else NOTHING,
        "mlp": layers * swiglu(d, config.mlp_hidden),
        **_residual(config),
        "head": head(d, config.vocab_size),
    }
    return {name: flops for name, flops in parts.items() if flops != NOTHING}


def _residual(config: GPTConfig) -> dict[str, Flops]:
    d, sublayers, n = config.hidden_size, 2 * config.num_layers, config.value_channels
    repeated = residuals.expand(d, n, "repeat", 1)
    match config.residual:
        case "additive":
            return {"norms and additions": sublayers * baselines.addition(d) + rms_norm(d)}
        case "additive-conv":
            read = residuals.read(d, 1, "token", config.compress_kernel_size)
            added = sublayers * (elementwise(d, 0) + residuals.shared(d))
            return {"reads and additions": (sublayers + 1) * read + added}
        case "expanded":
            reads = (sublayers + 1) * residuals.read(d, n, "channel", 1)
            added = sublayers * baselines.weighted_addition(d, n)
            return {"reads and additions": reads + added + repeated}
        case "attention-residual":
            of_all = baselines.attention_residual(d, sublayers, config.summed_sublayers)
            return {"attention residuals": of_all + rms_norm(d)}
        case "hc":
            connection = baselines.hyper_connection(d, n)
            end = elementwise(n * d, 0) + rms_norm(d)
        case "mhc":
            connection = baselines.manifold_connection(d, n)
            end = baselines.weighted_read(d, n) + rms_norm(d)
        case "independent-hc":
            connection = baselines.independent_connection(d, n)
            end = baselines.weighted_read(d, n) + rms_norm(d)
        case "gated":
            connection = baselines.gated_connection(d, n, config.gated_size)
            end = baselines.gated_read(d, n, config.gated_size)
        case _:
            return _stream(config)
    return {"hyper-connections": sublayers * connection + end + repeated}


def _stream(config: GPTConfig) -> dict[str, Flops]:
    """The parts of a delta stream: L sublayers have L + 1 reads, the last of them the readout."""
    d, sublayers, n = config.hidden_size, 2 * config.num_layers, config.rewrites
    m = 1 if config.residual == "ddl" else config.value_channels
    compress, expand = STREAMS[config.residual]
    one_read = residuals.read(d, m, compress, config.compress_kernel_size)
    anchors = config.anchor_every or spread_anchors(sublayers, m)
    links = (index % anchors for index in range(sublayers))
    again = (residuals.recomputed(d, m, n, compress, of_one) for of_one in links)
    # A state is read and rewritten: two gradients.
    reads = (sublayers + 1) * one_read + sublayers * residuals.shared(d * m)
    return {
        "expand": residuals.expand(d, m, expand, config.expand_kernel_size),
        "reads": reads,
        "values": sublayers * _values(config, d, m),
        "gates": sublayers * _gates(config, d, m),
        "directions": sublayers * _directions(config, d, m),
        "rewrites": reduce(add, again, sublayers * residuals.rewrite(d, m, n, erase=config.erase)),
    }


def _values(config: GPTConfig, d: int, m: int) -> Flops:
    if config.value == "constant":
        return NOTHING
    sigmoid, read = config.value == "sigmoid", config.mapping == "k"
    made = residuals.values(d, config.rewrites * m, sigmoid=sigmoid, bias=read)
    return made + (residuals.shared(d) if read else NOTHING)  # of the context or the raw read


def _gates(config: GPTConfig, d: int, m: int) -> Flops:
    number = config.rewrites
    if config.gate == "linear" and config.gate_from == "context":
        return residuals.gates(d, number) + residuals.shared(d)
    size_in = d * m if config.gate_from == "flatten" else d
    hidden = config.gate_hidden if config.gate == "mlp" else None
    made = residuals.projected_gates(size_in, number, hidden)
    if config.gate_from == "context":
        return made + residuals.shared(d)
    pooled = residuals.pool(d, m, config.gate_from, config.gate_kernel_size)
    return made + pooled + residuals.shared(d * m)


def _directions(config: GPTConfig, d: int, m: int) -> Flops:
    if config.mapping == "k":
        return residuals.further_directions(d, config.rewrites, config.direction_rank)
    of_context = residuals.shared(d) if config.direction in ("linear", "attention") else NOTHING
    of_state = NOTHING if config.direction == "linear" else residuals.shared(d * m)
    made = residuals.direction(d, m, config.direction, config.direction_hidden)
    return made + of_context + of_state
