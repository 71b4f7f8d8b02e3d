"""The model's shape. No torch in here, so that `ddl train --help` answers at once.

A value that cannot be used raises `InputError` with one sentence that names the field.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from .fields import (
    LEAST_EPS_K,
    check_counts,
    check_finite,
    check_literals,
    check_positive,
    require,
)

__all__ = ["RESIDUALS", "STREAMS", "Compress", "Expand", "GPTConfig", "Residual"]

Residual = Literal["additive", "ddl", "ddl-cc", "ddl-cc-noec", "ddl-tc", "ddl-tc-noec"]
RESIDUALS: tuple[str, ...] = get_args(Residual)

Compress = Literal["identity", "channel", "token"]
Expand = Literal["repeat", "conv"]

# The vocabulary of `DeltaStream`; the additive residual has none of it.
STREAMS: dict[str, tuple[Compress, Expand]] = {
    "ddl": ("identity", "repeat"),
    "ddl-cc": ("channel", "conv"),
    "ddl-cc-noec": ("channel", "repeat"),
    "ddl-tc": ("token", "conv"),
    "ddl-tc-noec": ("token", "repeat"),
}

# Options that others leave without effect: names, then the option they need and its values.
USED_WITH: dict[str, tuple[str, ...]] = {
    "mapping beta_init eps_k": ("residual", *STREAMS),
    "gate gate_hidden gate_from gate_kernel_size": ("residual", *STREAMS),
    "direction": ("mapping", "v"),
    "value value_init value_scale value_constant value_from": ("residual", *STREAMS),
    "value_channels sublayers_per_compressor compress_parameterization": (
        "residual", *(name for name, (compress, _) in STREAMS.items() if compress != "identity")
    ),
    "expand_kernel_size": (
        "residual", *(name for name, (_, expand) in STREAMS.items() if expand == "conv")
    ),
    "gate_hidden": ("gate", "mlp"),
    "gate_kernel_size": ("gate_from", "convolved"),
    "direction_hidden": ("direction", "mean", "flatten", "attention"),
    "value_init value_from": ("mapping", "k"),
    "value_init": ("value", "linear"),
    "value_scale": ("value", "sigmoid"),
    "value_constant": ("value", "constant"),
    "value_from": ("value", "linear", "sigmoid"),
}  # fmt: skip


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
    compress_parameterization: Literal["direct", "factored"] = "direct"
    """What a compressor learns: its weights, or, as in the papers' code, a convolution kernel and a
    read vector whose product they are."""
    compress_causal: bool = False
    """Whether ddl-cc's factored kernel looks back along the value channels; else it is centred."""
    expand_kernel_size: int = 4
    """Tokens that the embedding convolution looks at."""
    sublayers_per_compressor: int = 2
    """Consecutive sublayers that share one compressor; 2 is one per block, as in the papers."""
    mapping: Literal["k", "v"] = "k"
    """What a sublayer's output is: k, the direction of the rewrite, its value read from the stream;
    v, the value, its direction from the branch `direction`."""
    gate: Literal["linear", "mlp"] = "linear"
    """Gate β of the rewrite: one linear map, or linear-tanh-linear."""
    gate_hidden: int = 128
    """Hidden width of the `mlp` gate."""
    gate_from: Literal["context", "pooled", "convolved"] = "context"
    """The gate reads the sublayer's normalised context, the mean of the state over its value
    channels, or these means convolved over time. The latter two cost a pass over the state."""
    gate_kernel_size: int = 4
    """Tokens that a `convolved` gate looks at."""
    direction: Literal["linear", "mean", "flatten", "attention"] = "linear"
    """Direction of mapping v: a linear map of the context, an MLP over the mean of the value
    channels or over all of them, or the context's attention over the value channels."""
    direction_hidden: int = 128
    """Hidden width of the direction's MLP; width of its attention's queries and keys."""
    beta_init: float = 1.0
    """β at initialisation, between 0 (keep) and 2 (reflect); 1 replaces."""
    value: Literal["linear", "sigmoid", "constant"] = "linear"
    """What is written: a linear map, scale·sigmoid of one, or a constant."""
    value_init: float = 1.0
    """Bias of the `linear` value at initialisation. A value that starts around zero has a random
    sign in every token, so a sublayer would first have to learn which way its output is written."""
    value_scale: float = 4.0
    """Scale of the `sigmoid` value."""
    value_constant: float = 2.0
    """The `constant` value."""
    value_from: Literal["context", "compressed"] = "context"
    """The value reads the normalised context (arXiv 2601.00417) or, as in the published code, the
    raw read."""
    eps_k: float | None = None
    """ε_k in k / √(|k|² + ε_k²); None is 0.02·√d, which lets zero projections train."""

    def __post_init__(self) -> None:
        check_literals(self)
        check_counts(self, "vocab_size block_size num_layers num_heads hidden_size value_channels")
        check_counts(self, "compress_kernel_size expand_kernel_size sublayers_per_compressor")
        check_counts(self, "gate_hidden gate_kernel_size direction_hidden")
        causal = self.compress_causal
        require(isinstance(causal, bool), "compress_causal", "true or false", causal)
        check_positive(self, "rope_base beta_init value_scale")
        require(self.beta_init < 2, "beta_init", "between 0 and 2, both excluded", self.beta_init)
        check_finite(self, "value_init value_constant")
        if self.eps_k is not None:
            check_positive(self, "eps_k")
            require(self.eps_k >= LEAST_EPS_K, "eps_k", f"at least {LEAST_EPS_K:g}", self.eps_k)
        self._check_used()
        self._check_mapping()
        self._check_heads()

    def _check_mapping(self) -> None:
        """A sublayer that gives the value needs a value, attention something to choose from."""
        constant = self.mapping == "v" and self.value == "constant"
        require(not constant, "value", "linear or sigmoid if `mapping` is v", self.value)
        single = self.residual == "ddl" or self.value_channels == 1
        require(
            not single or self.direction != "attention",
            "direction",
            "linear, mean or flatten with one value channel",
            self.direction,
        )

    def _check_heads(self) -> None:
        """Every head is rotated in pairs."""
        if self.head_size is not None:
            check_counts(self, "head_size")
            require(self.head_size % 2 == 0, "head_size", "even", self.head_size)
            return
        pairs = 2 * self.num_heads
        expected = f"a multiple of 2·num_heads = {pairs}"
        require(self.hidden_size % pairs == 0, "hidden_size", expected, self.hidden_size)

    def _check_used(self) -> None:
        """Refuse options without effect, as DeltaStream does; a default passes."""
        for names, (option, *known) in USED_WITH.items():
            for name in names.split():
                self._require_used(
                    name, getattr(self, option) in known, f"`{option}` is {' or '.join(known)}"
                )
        compress, _ = STREAMS.get(self.residual, ("identity", "repeat"))
        factored = self.compress_parameterization == "factored"
        option = "`compress_parameterization` is factored"
        self._require_used(
            "compress_kernel_size",
            compress == "token" or factored,
            f"`residual` is ddl-tc or ddl-tc-noec, or {option}",
        )
        self._require_used(
            "compress_causal",
            compress == "channel" and factored,
            f"`residual` is ddl-cc or ddl-cc-noec and {option}",
        )

    def _require_used(self, name: str, used: bool, when: str) -> None:
        given, default = getattr(self, name), getattr(GPTConfig, name)
        require(used or given == default, name, f"left at {default} unless {when}", given)

    @property
    def head_dim(self) -> int:
        """Width of an attention head."""
        return self.head_size or self.hidden_size // self.num_heads

    @property
    def mlp_hidden(self) -> int:
        return 8 * self.hidden_size // 3
