"""Bytes that a forward pass keeps for its backward, by formula.

Per token, N tokens in a pass. Parameters and the tables of positions are not counted; the copies of
weights that autocast makes are. s: bytes of a number in the matrix products. One RMSNorm keeps its
input and 1/rms on a GPU; on a CPU it keeps the normalised input as well.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from ddl.lab.config import STREAMS, TrainConfig
from ddl.options import spread_anchors

from .parameters import channels, groups

FLOAT = 4  # bytes
FLASH_SEED = 24  # bytes: seed and offset of each attention on a GPU, kept even without dropout


class Kept(NamedTuple):
    """Bytes that are kept from the forward pass for the backward, in one process.

    sublayers: inside and before them. stream: states, directions, values, gates, statistics.
    weights: autocast's copies. loss: logarithms of probabilities, the head's input, targets.
    """

    sublayers: int
    stream: int
    weights: int
    loss: int

    @property
    def all(self) -> int:
        return sum(self)


def kept(config: TrainConfig, *, sharded: bool = False, gpu: bool = True) -> Kept:
    """Bytes that a forward pass of `config.batch_size` sequences keeps.

    sharded: by FSDP2. gpu: False for a CPU, whose RMSNorm keeps more.
    """
    tokens = config.batch_size * config.model.block_size
    return Kept(
        sublayers=_sublayers(config, tokens, sharded=sharded, gpu=gpu),
        stream=tokens * _stream(config, gpu=gpu),
        weights=copied_weights(config, sharded=sharded),
        loss=tokens * _loss(config) + 4,
    )


def product_bytes(config: TrainConfig) -> int:
    """Bytes of a number in matrix products, of contexts and of directions."""
    return 2 if config.precision == "bfloat16" else 4


def copied_weights(config: TrainConfig, *, sharded: bool) -> int:
    """Bytes of the weights that autocast converts, and that the backward needs.

    Sharded sublayers are gathered in bfloat16 already. Those that are recomputed are converted
    again.
    """
    if config.precision != "bfloat16":
        return 0
    *sublayers, _, embedding = groups(config.model)
    matrices = 0
    if not sharded and not config.recompute:
        matrices = sum(math.prod(s) for g in sublayers for s in g.shapes if len(s) == 2)
    return 2 * (matrices + embedding.numbers)


def _sublayers(config: TrainConfig, tokens: int, *, sharded: bool, gpu: bool) -> int:
    attentions = config.model.num_layers
    if config.recompute:
        return tokens * 2 * attentions * _context(config, uses=1)
    flash = FLASH_SEED * attentions * gpu
    inner = attention(config, sharded=sharded, gpu=gpu) + mlp(config)
    contexts = attentions * (_context(config, uses=3) + _context(config, uses=2))
    return tokens * (attentions * inner + contexts) + flash


def attention(config: TrainConfig, *, sharded: bool, gpu: bool) -> int:
    """Bytes per token inside an attention, without its input.

    Queries, keys, values and their mean, in the dtype of products; the logarithm of the softmax's
    sum for each head. Each QK-norm keeps 1/rms and its rotated input, on a GPU in the dtype of its
    weight, which is gathered in bfloat16 if sharded.
    """
    model, s = config.model, product_bytes(config)
    heads, width = model.num_heads, model.num_heads * model.head_dim
    rotated = (s if sharded else FLOAT) if gpu else 2 * FLOAT  # on a CPU normalised, too
    norm = width * rotated + heads * FLOAT
    return 4 * width * s + heads * FLOAT + 2 * norm


def mlp(config: TrainConfig) -> int:
    """Bytes per token inside an MLP, without its input: both products, silu, and what W₃ gets."""
    return 4 * config.model.mlp_hidden * product_bytes(config)


def _context(config: TrainConfig, *, uses: int) -> int:
    """Bytes per token of a sublayer's input.

    A delta stream writes it in the dtype of products. The additive model's norm writes float32:
    autocast converts it for each product, and `recompute` keeps it as it is.
    """
    d, s = config.model.hidden_size, product_bytes(config)
    if config.model.residual != "additive" or s == FLOAT:
        return d * s
    return d * FLOAT if config.recompute else uses * d * s


def state_bytes(config: TrainConfig) -> int:
    """Bytes of a number of the states."""
    lower = config.model.stream_dtype is not None and config.precision == "bfloat16"
    return 2 if lower else FLOAT


def _stream(config: TrainConfig, *, gpu: bool) -> int:
    """Bytes per token that the residual stream keeps."""
    model = config.model
    d, m, sublayers = model.hidden_size, channels(model), 2 * model.num_layers
    tokens = 8  # the embedding's
    if model.residual == "additive":
        norm = d * FLOAT * (1 if gpu else 2) + FLOAT  # the state, 1/rms, and on a CPU x/rms
        return tokens + (sublayers + 1) * norm
    compress, _ = STREAMS[model.residual]
    default = spread_anchors(sublayers, m, device_type="cuda" if gpu else "cpu")
    every = model.anchor_every or default
    states = math.ceil(sublayers / every) * d * m * state_bytes(config)
    # Of each rewrite the direction, v, β, and r and p of its statistics.
    rewrites = sublayers * (d * product_bytes(config) + (m + 1 + 1 + m) * FLOAT)
    # Of each read 1/rms, and x if it looks back in time.
    reads = (sublayers + 1) * (FLOAT + d * state_bytes(config) * (compress == "token"))
    embedding = d * state_bytes(config) * (m > 1)  # the expansion's input
    return tokens + states + rewrites + reads + embedding


def _loss(config: TrainConfig) -> int:
    """Bytes per token: logarithms of probabilities, the head's input, the target."""
    model = config.model
    return model.vocab_size * FLOAT + model.hidden_size * product_bytes(config) + 8
