"""FLOPs per token of the residual stream's parts: d features, m value channels, n rewrites.

The formulas count `ddl.reference` and the modules in plain PyTorch, by their leading terms: a few
operations per token on numbers that are neither d nor m are left out. What works on weights alone,
as the product of a factored compression does, costs the same for any number of tokens and is left
out, too. A part whose input has another user leaves the sum of their two gradients to `shared`.
"""

from __future__ import annotations

from ddl.options import Compress, Direction, Erase, ExpandKind, GateFrom

from .count import NOTHING, Flops, elementwise, product
from .sublayers import linear, rms_norm, softmax


def shared(size: float) -> Flops:
    """The sum of two gradients of a tensor of this size: size backward."""
    return elementwise(0, size)


def expand(d: int, m: int, kind: ExpandKind, kernel_size: int) -> Flops:
    """Embeddings to the first state.

    repeat: backward the sum over the channels, d·m, if m > 1. conv, with K taps: (2K − 1)·d·m
    forward, 4K·d·m + (K − 1)·d backward.
    """
    if kind == "repeat":
        return elementwise(0, d * m if m > 1 else 0)
    taps = kernel_size
    return elementwise((2 * taps - 1) * d * m, 4 * taps * d * m + (taps - 1) * d)


def compress(d: int, m: int, kind: Compress, kernel_size: int) -> Flops:
    """The state to d features. identity: nothing.

    channel: 2·d·m forward, 3·d·m backward. token, with K taps: 2K·d·m + (K − 1)·d forward and
    (4K − 1)·d·m backward.
    """
    if kind == "identity":
        return NOTHING
    taps = kernel_size if kind == "token" else 1
    return elementwise(2 * taps * d * m + (taps - 1) * d, (4 * taps - 1) * d * m)


def read(d: int, m: int, kind: Compress, kernel_size: int) -> Flops:
    """compress(X), then the norm with its weight."""
    return compress(d, m, kind, kernel_size) + rms_norm(d)


def gates(d: int, number: int) -> Flops:
    """β = 2·sigmoid(w·h + b), for this many gates of a context: 2d + 3 forward and 3d + 4
    backward for each; several have a sum over their gradients of h, d for each."""
    several = shared(number * d) if number > 1 else NOTHING
    return elementwise(number * (2 * d + 3), number * (3 * d + 4)) + several


def projected_gates(size_in: int, number: int, hidden: int | None) -> Flops:
    """β = 2·sigmoid(g(z)) with g a product of matrices: linear, or an MLP with `hidden` units."""
    squashed = elementwise(2 * number, 3 * number)
    if hidden is None:
        return linear(size_in, number, bias=True) + squashed
    layers = linear(size_in, hidden) + linear(hidden, number, bias=True)
    return layers + elementwise(hidden, 2 * hidden) + squashed


def values(d: int, number: int, *, sigmoid: bool, bias: bool = True) -> Flops:
    """v = φ(W z + b) for n·m = `number` values; a sigmoid and its scale add 2 forward, 3 back."""
    squashed = elementwise(2 * number, 3 * number) if sigmoid else NOTHING
    return linear(d, number, bias=bias) + squashed


def pool(d: int, m: int, kind: GateFrom, kernel_size: int = 4) -> Flops:
    """z of a gate or direction from the state.

    pooled: the mean over the channels, 2·d·m forward and d·m backward if m > 1, and a norm.
    convolved: K taps over time between the two. flatten: a norm of d·m numbers.
    """
    if kind == "context":
        return NOTHING
    if kind == "flatten":
        return rms_norm(d * m, weight=False)
    mean = elementwise(2 * d * m, d * m) if m > 1 else NOTHING
    taps = compress(d, 1, "token", kernel_size) if kind == "convolved" else NOTHING
    return mean + taps + rms_norm(d, weight=False)


def direction(d: int, m: int, kind: Direction, hidden: int) -> Flops:
    """k of mapping v. linear: W h. mean, flatten: a pool and an MLP with `hidden` units.

    attention, of width c = hidden: the channels' norms, logits, softmax and weighted sum, 7·d·m
    forward and 14·d·m backward, and maps with 2·c·d + d² multiply–adds.
    """
    if kind == "linear":
        return linear(d, d)
    if kind == "attention":
        maps = linear(d, hidden) + linear(hidden, d) + linear(d, d)
        attended = elementwise(7 * d * m, 14 * d * m) + softmax(m)
        return maps + attended
    width = d * m if kind == "flatten" else d
    pooled = pool(d, m, "flatten" if kind == "flatten" else "pooled")
    layers = linear(width, hidden) + linear(hidden, d) + elementwise(hidden, 2 * hidden)
    return pooled + layers


def further_directions(d: int, n: int, rank: int | None) -> Flops:
    """k₂ … k_n, linear in k₁: (n − 1)·d² multiply–adds, with a rank r n·r·d; a sum in k₁."""
    if n == 1:
        return NOTHING
    others = (n - 1) * d
    layers = linear(d, others) if rank is None else linear(d, rank) + linear(rank, others)
    return layers + shared(d)


def rewrite(d: int, m: int, n: int = 1, *, erase: Erase = "tied") -> Flops:
    """X + β k̂ (vᵀ − k̂ᵀX), n times.

    Forward k̂ and β k̂ (4·d), the readout k̂ᵀX, a product (2·d·m), the outer product and its sum with
    X (2·d·m). Backward the gradients of k̂, of the outer product's factors (4·d·m), of both factors
    of the readout, products (4·d·m), and a sum in X (d·m). The last three belong to the readout:
    X' = X + β k̂ vᵀ, which erases nothing, has none of them.
    """
    erased = NOTHING
    if erase == "tied":
        erased = product(d * m) + elementwise(m, m) + shared(d * m + d)
    return n * (elementwise(2 * d * m + 4 * d, 4 * d * m + 12 * d) + erased)


def recomputed(d: int, m: int, n: int, kind: Compress, links: int) -> Flops:
    """The work that a fused backward repeats: X by this many links from its anchor, X', and x.

    A link and X' are n products β k̂ eᵀ, which are added: n·(2·d·m + d). A channel read is 2·d·m; a
    token read's x is stored.
    """
    states = (links + 1) * n * (2 * d * m + d)
    return Flops(recomputed=states + (2 * d * m if kind == "channel" else 0))
