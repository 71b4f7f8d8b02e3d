"""GPTConfig: sizes and residual of a model. Imports no torch, so `--help` answers at once.

An invalid value raises `InputError` with one sentence that names the field.
"""

from __future__ import annotations

import math
from collections import abc
from dataclasses import dataclass
from typing import Any, cast, get_args

from ddl.errors import InputError
from ddl.fields import plain_numbers, require
from ddl.options import (
    MODEL_OPTIONS,
    RESIDUAL_OPTIONS,
    STREAM_OPTIONS,
    Compress,
    Direction,
    Erase,
    ExpandKind,
    Gate,
    GateFrom,
    InitialWeights,
    Mapping,
    Mixer,
    MixerGated,
    Parameterization,
    Residual,
    Scaling,
    StreamDtype,
    Value,
    ValueFrom,
    check_choice,
    check_left,
    check_options,
    check_residual,
    has_effect,
    quoted,
)

# Names that stand for another residual with erase="none".
NOT_ERASED: dict[str, Residual] = {"ddl-cc-none": "ddl-cc", "ddl-tc-none": "ddl-tc"}

RESIDUALS: tuple[str, ...] = tuple(name for name in get_args(Residual) if name not in NOT_ERASED)

# residual → `compress` and `expand` of DeltaStream.
STREAMS: dict[str, tuple[Compress, ExpandKind]] = {
    "ddl": ("identity", "repeat"),
    "ddl-cc": ("channel", "conv"),
    "ddl-cc-noec": ("channel", "repeat"),
    "ddl-tc": ("token", "conv"),
    "ddl-tc-noec": ("token", "repeat"),
}


def residual_of(compress: str, expand: str) -> Residual:
    """The name of the delta stream with these options."""
    streams = cast("dict[Residual, tuple[str, str]]", STREAMS)
    return next(name for name, stream in streams.items() if stream == (compress, expand))


# The same of every residual whose reads are those of DeltaStream.
READS: dict[str, tuple[Compress, ExpandKind]] = {
    **STREAMS,
    "expanded": ("channel", "repeat"),
    "additive-conv": ("token", "repeat"),
}

FUSED: tuple[str, ...] = (*STREAMS, "additive-conv")
"""The residuals that run our operators; the others are plain PyTorch."""

# Residuals without rewrites, to compare with.
BASELINES: tuple[str, ...] = tuple(name for name in RESIDUALS if name not in STREAMS)

PUBLISHED: tuple[str, ...] = ("additive", *STREAMS)
"""The residuals of the papers' code."""

SCALED: tuple[str, ...] = (*PUBLISHED, "expanded")
"""The residuals that have other parameterizations than the standard one."""

MOST_SUMS = 8  # of an attention-residual's default, as in its paper

# DeltaStream's name of an option → GPTConfig's.
SPELLED = {
    "kernel_size": "compress_kernel_size",
    "causal": "compress_causal",
}


# Options without any effect on the baselines.
OF_DELTA = RESIDUAL_OPTIONS | {n: STREAM_OPTIONS[n] for n in ("anchor_every", "stream_dtype")}

# More conditions of options than the table has.
FURTHER = {
    "parameterization": [{"residual": " ".join(SCALED), "mixer": "attention"}],
    "value_init": [{"initial_weights": "standard"}],
}


@dataclass(frozen=True)
class GPTConfig:
    """The Transformer of Deep Delta Learning (arXiv 2601.00417): RMSNorm, RoPE, QK-norm, SwiGLU,
    tied head, no biases. An option without effect under the other options must keep its default."""

    residual: Residual = "ddl-cc"
    """How a sublayer's output joins the stream. ddl: the delta rule with
    one value channel. ddl-cc, ddl-tc: the delta rule with `value_channels`, read by channel or
    token compression; with -noec, repetition replaces the embedding convolution. ddl-cc-none and
    ddl-tc-none are the residuals of the shorter names with erase="none", and stored so.
    Baselines: additive: x + F(norm(x)). additive-conv: the same, each read after a causal
    convolution. Between `value_channels` streams, hc: hyper-connections (arXiv 2409.19606); mhc:
    manifold-constrained ones (arXiv 2512.24880); independent-hc: those of HY-V4; gated: the gated
    residual of Qwen4; expanded: additions to all value channels, read as ddl-cc-noec.
    attention-residual: attention over earlier outputs (arXiv 2603.15031)."""
    vocab_size: int = 50304
    """Number of tokens: 256 for bytes; for GPT-2 50304, its 50257 tokens and padding."""
    block_size: int = 1024
    """Longest context in tokens."""
    num_layers: int = 12
    """Number of blocks, each with one attention and one MLP sublayer."""
    num_heads: int = 6
    """Number of attention heads; `heads` is another number, of the residual stream."""
    head_size: int | None = None
    """Width of an attention head; None for hidden_size / num_heads."""
    hidden_size: int = 768
    """Width d of the residual stream."""
    mlp_size: int | None = None
    """Hidden width of the MLP; None for ⌊8d/3⌋."""
    rope_base: float = 10000.0
    """Base of the rotary position embedding's frequencies."""
    mixer: Mixer = "attention"
    """Tokens are mixed by attention, or by the delta rule over time in one of DeltaMixer's kinds,
    with num_heads heads of head_size features."""
    mixer_layers: tuple[int, ...] | None = None
    """Numbers of the layers, from 0 on, that have the mixer, while the others have attention; None
    for all."""
    mixer_n: int = 1
    """n of the mixer's kind: its keys, values, states or queries per head."""
    mixer_gated: MixerGated = False
    """Decay of the mixer's states. False: none. True: one number per state and token. per-feature:
    one per key feature."""
    parameterization: Scaling = "standard"
    """How the model scales with its width and depth. standard: initial weights alone. mup: meant to
    have the best learning rate of base_width (arXiv 2203.03466), for additions and rewrites.
    completep: also that of base_layers (arXiv 2505.01618)."""
    base_width: int | None = None
    """hidden_size of the model whose learning rate this one shall have, with `mup` and `completep`;
    its attention heads are as wide as here."""
    base_layers: int | None = None
    """num_layers of that model, with `completep`."""
    initial_weights: InitialWeights = "standard"
    """The weights of a new model. standard: those of the papers' text, with `beta_init` and
    `value_init`. paper-code: those of the newest published code, where gates and values start at
    random, and the sublayers of deep models smaller."""

    value_channels: int = 4
    """Value channels m of ddl-cc, ddl-tc and expanded; streams of hc, mhc, independent-hc and
    gated. The other residuals have one."""
    compress_kernel_size: int = 4
    """Tokens that ddl-tc's compression and additive-conv's convolution span; value channels that
    ddl-cc's factored compression spans."""
    compress_parameterization: Parameterization = "direct"
    """Parameters of a compressor. direct: its weights. factored, as in the papers' code: a
    convolution and a read vector, whose product is the weights."""
    compress_causal: bool = False
    """Make ddl-cc's factored convolution causal along the value channels instead of centred."""
    read_init: float | None = None
    """Initial weight of each value channel in a compressor; None for 1 / value_channels, the mean.
    For a factored one the initial elements of its read vector."""
    expand_kernel_size: int = 4
    """Tokens that the embedding convolution spans."""
    sublayers_per_compressor: int = 2
    """Consecutive sublayers that share one compressor; 2 is one per block, as in the papers."""
    anchor_every: int | None = None
    """Every so many states of the stream are stored for the backward, at most 32; it computes the
    others again, to the same bits. None for 4 on a CUDA device and 8 elsewhere, or for the next
    larger number that spreads the stored states evenly; with one value channel for 1
    (every state)."""
    stream_dtype: StreamDtype | None = None
    """Dtype in which the states of the stream are stored under autocast; None for that of the
    embeddings."""
    mapping: Mapping = "k"
    """Role of a sublayer's output. k: it is the rewrite's direction, and the value comes from the
    read. v: it is the value, and the branch `direction` computes the direction."""
    gate: Gate = "linear"
    """Gate β of the rewrite. linear: one linear map. mlp: linear-tanh-linear."""
    gate_hidden: int = 128
    """Hidden width of the `mlp` gate."""
    gate_from: GateFrom = "context"
    """Input of the gate. context: the sublayer's normalised input. pooled: the mean of the state
    over its value channels. convolved: these means convolved over time. flatten: all numbers of the
    state. The latter three cost a pass over the state."""
    gate_kernel_size: int = 4
    """Tokens that the convolution of a `convolved` gate spans."""
    direction: Direction = "linear"
    """Direction for mapping v. linear: a linear map of the context. mean, flatten: an MLP over the
    mean of the value channels or over all of them. attention: the context's attention over them."""
    direction_hidden: int = 128
    """Hidden width of the direction's MLP; width of its attention's queries and keys."""
    beta_init: float = 1.0
    """β at initialisation, from 0 (keep) to 2 (reflect); 1 replaces. 0 and 2 start 2e-6 inside, so
    that the logit is finite."""
    value: Value = "linear"
    """Value of the rewrite: a linear map, value_scale·sigmoid of one, or a constant."""
    value_init: float = 1.0
    """Bias of the `linear` value at initialisation. A value that starts around zero has a random
    sign in every token, so a sublayer would first have to learn the sign of its output."""
    value_scale: float = 4.0
    """Scale of the `sigmoid` value."""
    value_constant: float = 2.0
    """The `constant` value."""
    value_from: ValueFrom = "context"
    """Input of the value. context: the normalised read (arXiv 2601.00417). compressed: the raw
    read, as in the published code."""
    rewrites: int = 1
    """Rewrites per sublayer, one after the other, at most 8, each with a value and a gate of its
    own. The first one's direction is the sublayer's output, the others' are linear maps of it."""
    erase: Erase = "tied"
    """A rewrite erases as much as it writes (tied), or nothing (none), which is the control without
    rewriting."""
    branch_scale: float = 1.0
    """Factor of what a rewrite changes: of its gate."""
    direction_rank: int | None = None
    """Rank of the linear map to the directions of further rewrites; None for a full one."""
    eps_k: float | None = None
    """ε_k in k / √(|k|² + ε_k²); None for 0.02·√d, so that zero-initialised projections train."""

    gated_rank: int | None = None
    """Rank of the gates of the residual `gated`; None for 5·hidden_size/32, as in Qwen4."""
    sublayers_per_block: int | None = None
    """Sublayers of an attention-residual whose outputs are summed before later ones attend to them;
    None for the number that makes at most 8 sums, 1 for attention to every output, and all of them
    or more for a single sum."""

    def __post_init__(self) -> None:
        check_choice("residual", self.residual, get_args(Residual))
        if self.residual in NOT_ERASED:
            object.__setattr__(self, "residual", NOT_ERASED[self.residual])
            object.__setattr__(self, "erase", "none")
        plain_numbers(self)
        given = _by_table_names(vars(self))
        check_options(given, MODEL_OPTIONS, _spelled)
        self._check_mixer_layers()
        check_options(given, STREAM_OPTIONS, _spelled)
        if self.residual in BASELINES:
            check_left(given, OF_DELTA, f"residual={quoted(STREAMS)}", others=("residual",))
        channels = 1 if self.residual == "ddl" else self.value_channels
        check_residual(given, channels)
        every = MODEL_OPTIONS | RESIDUAL_OPTIONS
        check_options(given, {name: every[name]._replace(used=FURTHER[name]) for name in FURTHER})
        self._check_heads()
        if self.parameterization != "standard":
            self._check_scaling()

    def _check_scaling(self) -> None:
        """Raise unless there is a model to scale from."""
        for name in ("base_width", "base_layers")[: 1 + (self.parameterization == "completep")]:
            if getattr(self, name) is None:
                expected = f"be given with parameterization={self.parameterization!r}"
                raise InputError(name, expected, "None", ("parameterization",))
        assert self.base_width is not None
        whole = self.num_heads * self.base_width % self.hidden_size == 0
        must = f"hidden_size/num_heads = {self.hidden_size / self.num_heads:g} times a number"
        require(whole, "base_width", must, self.base_width, ("hidden_size", "num_heads"))
        most = "at most num_layers = {}, or β would start above 2 with beta_init = {:g}"
        fits = self.residual == "additive" or self.beta_init / self.times_as_deep <= 2
        expected = most.format(self.num_layers, self.beta_init)
        require(fits, "base_layers", expected, self.base_layers, ("num_layers", "beta_init"))

    def _check_mixer_layers(self) -> None:
        """Raise unless the layers exist; keep them in order, as JSON's list would not be equal."""
        if self.mixer_layers is not None:
            layers = tuple(sorted(int(layer) for layer in self.mixer_layers))
            within = layers[-1] < self.num_layers
            expected = f"numbers below the {self.num_layers} layers"
            require(within, "mixer_layers", expected, self.mixer_layers, ("num_layers",))
            object.__setattr__(self, "mixer_layers", layers)

    def _check_heads(self) -> None:
        """Raise unless the width of a head is even: RoPE rotates its features in pairs."""
        if self.head_size is not None:
            require(self.head_size % 2 == 0, "head_size", "even", self.head_size)
        else:
            pairs = 2 * self.num_heads
            expected = f"a multiple of 2·num_heads = {pairs}"
            require(self.hidden_size % pairs == 0, "hidden_size", expected, self.hidden_size)

    @property
    def head_dim(self) -> int:
        """Width of an attention head."""
        return self.head_size or self.hidden_size // self.num_heads

    @property
    def mixing_layers(self) -> tuple[int, ...]:
        """Numbers of the layers that have the mixer; the others have attention."""
        if self.mixer == "attention":
            return ()
        return tuple(range(self.num_layers)) if self.mixer_layers is None else self.mixer_layers

    @property
    def attends(self) -> bool:
        """Whether a layer has attention, for which past tokens take memory."""
        return len(self.mixing_layers) < self.num_layers

    @property
    def looks_back(self) -> bool:
        """Whether something besides attention is computed from earlier tokens, too."""
        compress, expand = READS.get(self.residual, ("identity", "repeat"))
        return (
            bool(self.mixing_layers)
            or (compress == "token" and self.compress_kernel_size > 1)
            or (expand == "conv" and self.expand_kernel_size > 1)
            or self.gate_from == "convolved"
        )

    @property
    def mlp_hidden(self) -> int:
        """Hidden width of the MLP."""
        return self.mlp_size or 8 * self.hidden_size // 3

    @property
    def times_as_wide(self) -> float:
        """hidden_size / base_width; 1 in the standard parameterization."""
        return 1.0 if self.base_width is None else self.hidden_size / self.base_width

    @property
    def times_as_deep(self) -> float:
        """num_layers / base_layers; 1 unless the parameterization is completep."""
        return 1.0 if self.base_layers is None else self.num_layers / self.base_layers

    @property
    def rewrite_options(self) -> dict[str, Any]:
        """The options of DeltaResidual, at this width and depth (docs/transfer.md)."""
        options = {name: getattr(self, name) for name in RESIDUAL_OPTIONS}
        options["branch_scale"] /= self.times_as_deep
        if self.eps_k is not None:
            options["eps_k"] *= math.sqrt(self.times_as_wide)
        scaled = {"linear": "value_init", "sigmoid": "value_scale", "constant": "value_constant"}
        if self.mapping == "k" or self.value != "linear":  # whose value has no bias
            options[scaled[self.value]] *= math.sqrt(self.times_as_wide)
        return options

    @property
    def gated_size(self) -> int:
        """Rank of the gates of the residual `gated`."""
        return self.gated_rank or max(1, 5 * self.hidden_size // 32)

    @property
    def summed_sublayers(self) -> int:
        """Sublayers per sum of an attention-residual."""
        return self.sublayers_per_block or -(-2 * self.num_layers // MOST_SUMS)


def idle_options(fields: abc.Mapping[str, Any]) -> set[str]:
    """Return the names of the options that have no effect in a GPTConfig with these fields."""
    given = _by_table_names(fields)
    options = MODEL_OPTIONS | STREAM_OPTIONS | RESIDUAL_OPTIONS
    idle = {name for name, option in options.items() if not has_effect(option, given)}
    if fields["residual"] in BASELINES:
        idle |= OF_DELTA.keys()
    return {SPELLED.get(name, name) for name in idle} & fields.keys()


def _by_table_names(fields: abc.Mapping[str, Any]) -> dict[str, Any]:
    """Return GPTConfig's fields under the names of DeltaStream's options, which the table has."""
    compress, expand = READS.get(fields["residual"], ("identity", "repeat"))
    given = {**fields, **{name: fields[ours] for name, ours in SPELLED.items()}}
    return given | {"compress": compress, "expand": expand}


def _spelled(name: str, values: abc.Sequence[str]) -> tuple[str, abc.Sequence[str]]:
    """Convert DeltaStream's option to GPTConfig's, where `residual` sets compress and expand."""
    if name in ("compress", "expand"):
        part = 0 if name == "compress" else 1
        return "residual", [name for name, stream in READS.items() if stream[part] in values]
    return SPELLED.get(name, name), values
