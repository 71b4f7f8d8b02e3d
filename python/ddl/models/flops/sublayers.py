"""FLOPs per token of what every residual has: sublayers, norms, embedding and head.

The formulas count plain PyTorch. A tensor that is used twice has two gradients, whose sum counts 1
for each element. Copies, slices, masks and conversions of dtypes count nothing.
"""

from __future__ import annotations

from .count import Flops, elementwise, product


def linear(size_in: int, size_out: int, *, bias: bool = False) -> Flops:
    """W z + b: 2·in·out forward, 4·in·out backward; a bias adds out to both."""
    added = size_out if bias else 0
    return product(size_in * size_out) + elementwise(added, added)


def rms_norm(width: int, *, weight: bool = True) -> Flops:
    """x / √(mean(x²) + ε) · γ: 4·width forward and 10·width backward, without γ 3 and 7."""
    return elementwise(4 * width, 10 * width) if weight else elementwise(3 * width, 7 * width)


def layer_norm(width: int) -> Flops:
    """(x − μ)/√(σ² + ε) · γ + b: 7·width forward, 15·width backward."""
    return elementwise(7 * width, 15 * width)


def rotary(width: int) -> Flops:
    """A rotation of pairs: 3·width forward; backward as much, and a sign for half of them."""
    return elementwise(3 * width, 3.5 * width)


def softmax(size: float) -> Flops:
    """Largest, difference, exp, sum, quotient: 5·size forward; y ∘ (g − Σ g ∘ y): 4 backward."""
    return elementwise(5 * size, 4 * size)


def attention_core(width: int, heads: int, keys: float) -> Flops:
    """softmax(q kᵀ/√c) v over this many keys, for `heads` heads of `width` features together.

    Two products of keys·width multiply–adds: 8·keys·width FLOPs backward, 4 forward. The softmax
    of keys·heads numbers, and the scale, taken into q and k before their product.
    """
    return 2 * product(keys * width) + softmax(keys * heads) + elementwise(2 * width, 2 * width)


def attention(hidden_size: int, width: int, heads: int, keys: float) -> Flops:
    """The sublayer: 4 linear maps, QK-norm, rotary positions, and `attention_core`.

    width: of all heads together. keys: that a token sees; (T + 1)/2 on average, if it is causal.
    Three maps of the context have three gradients of it, whose sum is 2·hidden_size.
    """
    maps = 3 * linear(hidden_size, width) + linear(width, hidden_size)
    positions = 2 * (rotary(width) + rms_norm(width))
    joined = elementwise(0, 2 * hidden_size)
    return maps + positions + attention_core(width, heads, keys) + joined


def swiglu(hidden_size: int, hidden: int) -> Flops:
    """(silu(h W₁) ∘ (h W₂)) W₃: 3 linear maps, 2·hidden forward, 4·hidden + hidden_size backward.

    Two maps of the context have two gradients of it.
    """
    maps = 2 * linear(hidden_size, hidden) + linear(hidden, hidden_size)
    return maps + elementwise(2 * hidden, 4 * hidden + hidden_size)


def embedding(hidden_size: int) -> Flops:
    """A row of a table: nothing forward; its gradient is added to the table's backward."""
    return elementwise(0, hidden_size)


def head(hidden_size: int, vocabulary: int) -> Flops:
    """Logits and cross-entropy: a linear map, then 5·vocabulary forward and 4 backward.

    Largest, difference, exp, sum and difference again; backward exp, product, sum and difference.
    """
    return linear(hidden_size, vocabulary) + elementwise(5 * vocabulary, 4 * vocabulary)
