"""The model's shape. No torch in here, so that `ddl train --help` answers at once.

A value that cannot be used raises `InputError` with one sentence that names the field.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import get_args

from ddl.options import (
    MODEL_OPTIONS,
    RESIDUAL_OPTIONS,
    STREAM_OPTIONS,
    Compress,
    Direction,
    ExpandKind,
    Gate,
    GateFrom,
    Mapping,
    Parameterization,
    Residual,
    Value,
    ValueFrom,
    check_left,
    check_options,
    check_residual,
    quoted,
)

from .fields import plain_numbers, require

__all__ = ["RESIDUALS", "STREAMS", "GPTConfig"]

RESIDUALS: tuple[str, ...] = get_args(Residual)

# `compress` and `expand` of DeltaStream; the additive residual has none of it.
STREAMS: dict[str, tuple[Compress, ExpandKind]] = {
    "ddl": ("identity", "repeat"),
    "ddl-cc": ("channel", "conv"),
    "ddl-cc-noec": ("channel", "repeat"),
    "ddl-tc": ("token", "conv"),
    "ddl-tc-noec": ("token", "repeat"),
}

# DeltaStream's names of options, and GPTConfig's.
SPELLED = {
    "kernel_size": "compress_kernel_size",
    "parameterization": "compress_parameterization",
    "causal": "compress_causal",
}


@dataclass(frozen=True)
class GPTConfig:
    """The Transformer of Deep Delta Learning (arXiv 2601.00417): RMSNorm, RoPE, QK-norm, SwiGLU,
    tied head, no biases. An option that the others leave without effect must keep its default."""

    residual: Residual = "ddl-cc"
    """How a sublayer's output joins the stream. additive: x + F(norm(x)). ddl: delta rule, scalar
    state. ddl-cc and ddl-tc: `value_channels` copies of the stream, read back by channel or token
    compression; -noec replaces the embedding convolution by repetition."""
    vocab_size: int = 50304
    """Number of tokens. 256 reads bytes; GPT-2's 50257 are padded to 50304."""
    block_size: int = 1024
    """Longest context in tokens."""
    num_layers: int = 12
    """Blocks; each is one attention and one MLP sublayer."""
    num_heads: int = 6
    """Attention heads."""
    head_size: int | None = None
    """Width of an attention head; None is hidden_size / num_heads."""
    hidden_size: int = 768
    """Width d of the residual stream. The MLP's hidden width is ⌊8d/3⌋."""
    rope_base: float = 10000.0
    """Base of the rotary frequencies."""

    value_channels: int = 4
    """Value channels m of ddl-cc and ddl-tc (ddl has one)."""
    compress_kernel_size: int = 4
    """Tokens that ddl-tc's compression looks at; taps of ddl-cc's factored one."""
    compress_parameterization: Parameterization = "direct"
    """What a compressor learns: its weights, or, as in the papers' code, a convolution kernel and a
    read vector whose product they are."""
    compress_causal: bool = False
    """Whether ddl-cc's factored kernel looks back along the value channels; else it is centred."""
    expand_kernel_size: int = 4
    """Tokens that the embedding convolution looks at."""
    sublayers_per_compressor: int = 2
    """Consecutive sublayers that share one compressor; 2 is one per block, as in the papers."""
    mapping: Mapping = "k"
    """What a sublayer's output is: k, the direction of the rewrite, its value read from the stream;
    v, the value, its direction from the branch `direction`."""
    gate: Gate = "linear"
    """Gate β of the rewrite: one linear map, or linear-tanh-linear."""
    gate_hidden: int = 128
    """Hidden width of the `mlp` gate."""
    gate_from: GateFrom = "context"
    """The gate reads the sublayer's normalised context, the mean of the state over its value
    channels, or these means convolved over time. The latter two cost a pass over the state."""
    gate_kernel_size: int = 4
    """Tokens that a `convolved` gate looks at."""
    direction: Direction = "linear"
    """Direction of mapping v: a linear map of the context, an MLP over the mean of the value
    channels or over all of them, or the context's attention over the value channels."""
    direction_hidden: int = 128
    """Hidden width of the direction's MLP; width of its attention's queries and keys."""
    beta_init: float = 1.0
    """β at initialisation, between 0 (keep) and 2 (reflect); 1 replaces."""
    value: Value = "linear"
    """What is written: a linear map, scale·sigmoid of one, or a constant."""
    value_init: float = 1.0
    """Bias of the `linear` value at initialisation. A value that starts around zero has a random
    sign in every token, so a sublayer would first have to learn which way its output is written."""
    value_scale: float = 4.0
    """Scale of the `sigmoid` value."""
    value_constant: float = 2.0
    """The `constant` value."""
    value_from: ValueFrom = "context"
    """The value reads the normalised context (arXiv 2601.00417) or, as in the published code, the
    raw read."""
    eps_k: float | None = None
    """ε_k in k / √(|k|² + ε_k²); None is 0.02·√d, which lets zero projections train."""

    def __post_init__(self) -> None:
        plain_numbers(self)
        compress, expand = STREAMS.get(self.residual, ("identity", "repeat"))
        given = vars(self) | {name: getattr(self, ours) for name, ours in SPELLED.items()}
        given |= {"compress": compress, "expand": expand}
        check_options(given, MODEL_OPTIONS, _spelled)
        check_options(given, STREAM_OPTIONS, _spelled)
        if self.residual == "additive":
            check_left(given, RESIDUAL_OPTIONS, f"residual={quoted(STREAMS)}")
        check_residual(given, 1 if self.residual == "ddl" else self.value_channels)
        self._check_heads()

    def _check_heads(self) -> None:
        """Every head is rotated in pairs."""
        if self.head_size is not None:
            require(self.head_size % 2 == 0, "head_size", "even", self.head_size)
            return
        pairs = 2 * self.num_heads
        expected = f"a multiple of 2·num_heads = {pairs}"
        require(self.hidden_size % pairs == 0, "hidden_size", expected, self.hidden_size)

    @property
    def head_dim(self) -> int:
        """Width of an attention head."""
        return self.head_size or self.hidden_size // self.num_heads

    @property
    def mlp_hidden(self) -> int:
        return 8 * self.hidden_size // 3


def _spelled(name: str, values: Sequence[str]) -> tuple[str, Sequence[str]]:
    """An option of DeltaStream in GPTConfig's words: `residual` stands for compress and expand."""
    if name in ("compress", "expand"):
        part = 0 if name == "compress" else 1
        return "residual", [name for name, stream in STREAMS.items() if stream[part] in values]
    return SPELLED.get(name, name), values
