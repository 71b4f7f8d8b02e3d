"""FLOPs per token of a model's parts: one function for each row of docs/flops.md.

d features, m value channels, n rewrites or streams. The formulas count plain PyTorch
(`ddl.reference` for the stream) by their leading terms; docs/flops.md has the conventions. torch's
FlopCounterMode counts products of matrices alone, so it is not the source: the tests compare the
products with it, and all other work with a count of the operations that torch runs.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass

from ddl.layouts import layout_of
from ddl.options import Compress, Direction, Erase, ExpandKind, GateFrom

from ..config import GPTConfig


@dataclass(frozen=True)
class Flops:
    """Floating-point operations per token. A multiply–add counts 2, in products of matrices and
    elsewhere; a function of one number (exp, tanh, sigmoid, a root, a quotient) counts 1.

    forward, backward: of all work, in the plain PyTorch form (`ddl.reference` for the stream).
    matrix_forward, matrix_backward: the part of these in products of matrices.
    recomputed: what the fused backward computes again instead of storing it; in no total.
    """

    forward: float = 0.0
    backward: float = 0.0
    matrix_forward: float = 0.0
    matrix_backward: float = 0.0
    recomputed: float = 0.0

    @property
    def total(self) -> float:
        """Forward and backward, without what is recomputed."""
        return self.forward + self.backward

    @property
    def matrix(self) -> float:
        """The part of `total` in products of matrices."""
        return self.matrix_forward + self.matrix_backward

    def __add__(self, other: Flops) -> Flops:
        return Flops(*map(operator.add, vars(self).values(), vars(other).values()))

    def __mul__(self, times: float) -> Flops:
        return Flops(*(number * times for number in vars(self).values()))

    __rmul__ = __mul__


NOTHING = Flops()


def work(products: float, forward: float = 0, backward: float = 0) -> Flops:
    """Products of matrices with this many multiply–adds per token, the gradients of both factors,
    and other work: elementwise operations, sums and means."""
    first, second = 2 * products, 4 * products
    return Flops(first + forward, second + backward, first, second)


def shared(size: float) -> Flops:
    """The sum of two gradients of a tensor of this size, which has two users."""
    return work(0, 0, size)


# --- sublayers, norms, embedding and head ---------------------------------------------------------


def linear(size_in: int, size_out: int, *, bias: bool = False) -> Flops:
    added = size_out if bias else 0
    return work(size_in * size_out, added, added)


def rms_norm(width: int, *, weight: bool = True) -> Flops:
    return work(0, 4 * width, 10 * width) if weight else work(0, 3 * width, 7 * width)


def softmax(size: float) -> Flops:
    """Largest, difference, exp, sum, quotient; backward y ∘ (g − Σ g ∘ y)."""
    return work(0, 5 * size, 4 * size)


def attention(d: int, width: int, heads: int, keys: float) -> Flops:
    """The sublayer: 4 linear maps, QK-norm, rotary positions, and softmax(q kᵀ/√c) v.

    width: of all heads together. keys: that a token sees; (T + 1)/2 on average, if it is causal.
    """
    others = work(0, 16 * width, 29 * width) + softmax(keys * heads)
    return 4 * linear(d, width) + work(2 * keys * width) + others + shared(2 * d)


def swiglu(d: int, hidden: int) -> Flops:
    return 3 * linear(d, hidden) + work(0, 2 * hidden, 4 * hidden) + shared(d)


def head(d: int, vocabulary: int) -> Flops:
    """Logits and cross-entropy."""
    return linear(d, vocabulary) + work(0, 5 * vocabulary, 4 * vocabulary)


# --- mixers over time, as `ddl.reference.delta_rule` computes them --------------------------------


def mixer(config: GPTConfig) -> Flops:
    """The sublayer: five linear maps, convolutions of 4 tokens, unit q and k, gates, and the
    recurrence."""
    assert config.mixer != "attention", "there is a mixer"
    d, size, heads = config.hidden_size, config.head_dim, config.num_heads
    layout = layout_of(config.mixer, config.mixer_n)
    states, outputs = heads * layout.states, heads * max(layout.queries, layout.states)
    q = heads * layout.queries * size
    k, v = (layout.steps * heads * number * size for number in (layout.keys, layout.values))
    y = outputs * size
    maps = linear(d, q + k + v + y) + linear(y, d)
    others = work(
        0, 12 * (q + k + v) + 4 * (q + k) + 6 * y, 17 * (q + k + v) + 8 * (q + k) + 14 * y
    )
    gates = projected_gates(d, layout.steps * states, None) + decay(config, states)
    users = 5 if config.mixer_gated else 4
    one_state = recurrence(size, layout.steps, outputs // states, config.mixer_gated)
    return maps + others + gates + shared(users * d) + states * one_state


def decay(config: GPTConfig, states: int) -> Flops:
    """g = −exp(a)·softplus(f(h) + b), for each state or for each of its key features."""
    d, size = config.hidden_size, config.head_dim
    if not config.mixer_gated:
        return NOTHING
    if config.mixer_gated is True:
        return linear(d, states, bias=True) + work(0, 2 * states, 4 * states)
    maps = linear(d, size) + linear(size, states * size, bias=True)
    return maps + work(0, 2 * states * size, 4 * states * size)


def recurrence(size: int, steps: int, queries: int, gated: bool | str) -> Flops:
    """One token of one state S of size² numbers, with as many steps, kᵀS and S + k wᵀ, and
    queries."""
    numbers = size * size
    step = work(numbers, 2 * numbers + 2 * size, 5 * numbers + 4 * size)
    decayed = work(0, numbers, 3 * numbers) if gated else NOTHING
    return steps * step + queries * work(numbers, size, size) + shared(numbers) + decayed


# --- the delta stream -----------------------------------------------------------------------------


def expand(d: int, m: int, kind: ExpandKind, taps: int) -> Flops:
    """Embeddings to the first state."""
    if kind == "repeat":
        return shared(d * m if m > 1 else 0)
    return work(0, (2 * taps - 1) * d * m, 4 * taps * d * m + (taps - 1) * d)


def compress(d: int, m: int, kind: Compress, taps: int) -> Flops:
    """The state to d features. taps: of a token compression."""
    if kind == "identity":
        return NOTHING
    taps = taps if kind == "token" else 1
    return work(0, 2 * taps * d * m + (taps - 1) * d, (4 * taps - 1) * d * m)


def read(d: int, m: int, kind: Compress, taps: int) -> Flops:
    """compress(X), then the norm with its weight."""
    return compress(d, m, kind, taps) + rms_norm(d)


def gates(d: int, number: int) -> Flops:
    """β = 2·sigmoid(w·h + b), for this many gates of a context."""
    several = number * d if number > 1 else 0
    return work(0, number * (2 * d + 3), number * (3 * d + 4) + several)


def projected_gates(size_in: int, number: int, hidden: int | None) -> Flops:
    """β = 2·sigmoid(g(z)) with g a product of matrices: linear, or an MLP with `hidden` units."""
    squashed = work(0, 2 * number, 3 * number)
    if hidden is None:
        return linear(size_in, number, bias=True) + squashed
    layers = linear(size_in, hidden) + linear(hidden, number, bias=True)
    return layers + work(0, hidden, 2 * hidden) + squashed


def values(d: int, number: int, *, sigmoid: bool, bias: bool = True) -> Flops:
    """v = φ(W z + b) for n·m = `number` values."""
    squashed = work(0, 2 * number, 3 * number) if sigmoid else NOTHING
    return linear(d, number, bias=bias) + squashed


def pool(d: int, m: int, kind: GateFrom, taps: int = 4) -> Flops:
    """z of a gate or direction from the state, with its norm."""
    if kind == "flatten":
        return rms_norm(d * m, weight=False)
    mean = work(0, 2 * d * m, d * m) if m > 1 else NOTHING
    convolved = compress(d, 1, "token", taps) if kind == "convolved" else NOTHING
    return mean + convolved + rms_norm(d, weight=False)


def direction(d: int, m: int, kind: Direction, hidden: int) -> Flops:
    """k of mapping v: W h, an MLP of a pool with `hidden` units, or attention of that width over
    the value channels."""
    if kind == "linear":
        return linear(d, d)
    if kind == "attention":
        maps = linear(d, hidden) + linear(hidden, d) + linear(d, d)
        return maps + work(0, 7 * d * m, 14 * d * m) + softmax(m)
    width = d * m if kind == "flatten" else d
    layers = linear(width, hidden) + linear(hidden, d) + work(0, hidden, 2 * hidden)
    return pool(d, m, "flatten" if kind == "flatten" else "pooled") + layers


def further_directions(d: int, n: int, rank: int | None) -> Flops:
    """k₂ … k_n, linear in k₁."""
    if n == 1:
        return NOTHING
    others = (n - 1) * d
    layers = linear(d, others) if rank is None else linear(d, rank) + linear(rank, others)
    return layers + shared(d)


def rewrite(d: int, m: int, n: int = 1, *, erase: Erase = "tied") -> Flops:
    """X + β k̂ (vᵀ − k̂ᵀX), n times; without the readout k̂ᵀX if nothing is erased."""
    if erase == "none":
        return n * work(0, 2 * d * m + 4 * d, 4 * d * m + 12 * d)
    return n * work(d * m, 2 * d * m + 4 * d + m, 5 * d * m + 13 * d + m)


def recomputed(d: int, m: int, n: int, kind: Compress, links: int) -> Flops:
    """The work that a fused backward repeats: X by this many links from its anchor, X', and x,
    unless it is a token read's, which is stored."""
    states = (links + 1) * n * (2 * d * m + d)
    return Flops(recomputed=states + (2 * d * m if kind == "channel" else 0))


# --- streams without rewrites ---------------------------------------------------------------------


def addition(d: int) -> Flops:
    """x + F(norm(x))."""
    return work(0, 5 * d, 11 * d)


def hyper_connection(d: int, n: int) -> Flops:
    """The mixing of hyper-connections around one sublayer, with the norm before it."""
    of_weights = n * (n + 2)
    forward, backward = (9 * n + 4) * d + 3 * of_weights, (22 * n + 11) * d + 6 * of_weights
    return work(n * (2 * n + 3) * d, forward, backward)


def weighted_addition(d: int, n: int) -> Flops:
    """X + F(h) (β v)ᵀ of `expanded`, with gate and values of the context."""
    weights = projected_gates(d, 1, None) + values(d, n, sigmoid=False) + work(0, n, 2 * n)
    return weights + work(0, 2 * n * d, 5 * n * d + 2 * d)


def weighted_read(d: int, n: int) -> Flops:
    """Σ_j a_j X_j with a = sigmoid(s W rms(vec X) + c) + ε."""
    return work(n * n * d, 5 * n * d + 4 * n, 11 * n * d + 6 * n)


def independent_connection(d: int, n: int) -> Flops:
    """`weighted_read`, n more weights to join the output, and the norm before the sublayer."""
    return work(2 * n * n * d, (7 * n + 4) * d + 9 * n, (16 * n + 10) * d + 13 * n)


def manifold_connection(d: int, n: int) -> Flops:
    """`independent_connection`, n² more weights, the mixing of the streams, and Sinkhorn's 39
    divisions by sums of rows or columns (20 iterations, the first by columns alone)."""
    mixing = work((n + 1) * n * n * d, 8 * n * n, 8 * n * n)
    sinkhorn = 39 * work(0, 2 * n * n + n, 7 * n * n)
    return independent_connection(d, n) + mixing + sinkhorn


def gated_read(d: int, n: int, rank: int) -> Flops:
    """mean_j A_j ∘ X̃_j, with a norm of n·d numbers and as many gates of a rank."""
    return work(2 * n * d * rank, 7 * n * d + 2 * rank, 16 * n * d + 3 * rank)


def gated_connection(d: int, n: int, rank: int) -> Flops:
    """`gated_read`, and n weights to join the output."""
    return gated_read(d, n, rank) + work(n * n * d, 2 * n * d + 3 * n, 6 * n * d + 4 * n)


def attention_read(d: int, sums: int) -> Flops:
    """Σ_i softmax_i(q · rms(v_i)) v_i of so many v."""
    return work(0, (6 * sums - 1) * d + 8 * sums, 11 * sums * d + 14 * sums)


def attention_residual(d: int, sublayers: int, per_block: int) -> Flops:
    """The reads after every sublayer, its norm, and the sums of outputs and of their gradients."""
    sums = [1 + -(-index // per_block) for index in range(1, sublayers + 1)]
    added = sublayers - (sums[-1] - 1)  # outputs that are added to an earlier one
    reads = (attention_read(d, number) for number in sums)
    users = (sum(sums) + added - sublayers) * d
    return sum(reads, sublayers * rms_norm(d) + work(0, added * d, users))
