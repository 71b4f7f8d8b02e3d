"""The parameters of a model by formula, and in which groups FSDP2 gathers them.

d: width. m: value channels. H: heads. W: width of all heads. f: width of the MLP. V: tokens.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import fields
from typing import NamedTuple

from ddl.errors import InputError
from ddl.lab.config import PUBLISHED, STREAMS, GPTConfig

Shape = tuple[int, ...]

# The options that the formulas know. With others a residual has, and stores, other parameters.
KNOWN = (
    *("residual", "vocab_size", "block_size", "num_layers", "num_heads", "head_size"),
    *("hidden_size", "mlp_size", "rope_base", "value_channels", "compress_kernel_size"),
    *("expand_kernel_size", "read_init", "anchor_every", "stream_dtype"),
    *("sublayers_per_compressor", "beta_init", "value_init", "eps_k"),
)


class Group(NamedTuple):
    """Parameters that FSDP2 gathers together.

    name: attention, mlp, stream (the residual's own) or embedding (which is the head, too).
    """

    name: str
    shapes: tuple[Shape, ...]

    @property
    def numbers(self) -> int:
        return sum(math.prod(shape) for shape in self.shapes)

    def padded(self, processes: int) -> int:
        """Numbers of all shards together.

        A shard has the same number of rows (of dimension 0) in every process; the last ones are
        padded. So a parameter with fewer rows than there are processes gets as many rows as those,
        unless it is one of the stream's that is divided by features instead.
        """
        return sum(self._padded(shape, processes) for shape in self.shapes)

    def _padded(self, shape: Shape, processes: int) -> int:
        few_rows = self.name == "stream" and len(shape) > 1 and shape[0] < processes
        if few_rows and shape[1] % processes == 0:
            return math.prod(shape)
        return math.ceil(shape[0] / processes) * processes * math.prod(shape[1:])


def groups(config: GPTConfig) -> list[Group]:
    """The sublayers in their order, then the stream and the embedding.

    Raises InputError if an option changes parameters in a way that the formulas do not know.
    """
    _check(config)
    d, f, heads = config.hidden_size, config.mlp_hidden, config.num_heads * config.head_dim
    attention = Group("attention", (*[(heads, d)] * 3, (d, heads), *[(config.head_dim,)] * 2))
    mlp = Group("mlp", ((f, d), (f, d), (d, f)))
    return [
        *[attention, mlp] * config.num_layers,
        Group("stream", tuple(_stream(config))),
        Group("embedding", ((config.vocab_size, d),)),
    ]


def count(config: GPTConfig) -> int:
    """The number of parameters."""
    return sum(group.numbers for group in groups(config))


def tensors(config: GPTConfig) -> int:
    """The number of parameter tensors."""
    return sum(len(group.shapes) for group in groups(config))


def channels(config: GPTConfig) -> int:
    """m, 1 for the additive residual."""
    return 1 if config.residual in ("additive", "ddl") else config.value_channels


def _stream(config: GPTConfig) -> Iterator[Shape]:
    d, m, sublayers = config.hidden_size, channels(config), 2 * config.num_layers
    yield from [(d,)] * (sublayers + 1)  # the norms, that of the final read among them
    if config.residual == "additive":
        return
    compress, expand = STREAMS[config.residual]
    if expand == "conv":
        yield (d, m, config.expand_kernel_size)
    if compress != "identity":
        taps = (config.compress_kernel_size,) if compress == "token" else ()
        compressors = math.ceil(sublayers / config.sublayers_per_compressor) + 1
        yield from [(d, m, *taps)] * compressors
    for _ in range(sublayers):
        yield from ((1, d), (1,), (m, d), (m,))  # gate and value


def _check(config: GPTConfig) -> None:
    if config.residual not in PUBLISHED:
        raise InputError(
            "residual", "be additive or one of the delta streams", repr(config.residual)
        )
    for field in fields(config):
        value = getattr(config, field.name)
        if field.name not in KNOWN and value != field.default:
            expected = f"{field.default!r}, the only one that the formulas know"
            raise InputError(field.name, f"be {expected}", repr(value))
