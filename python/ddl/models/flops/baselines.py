"""FLOPs per token of streams without rewrites: d features, n streams. As in `residuals`."""

from __future__ import annotations

from .count import Flops, elementwise, product
from .residuals import projected_gates, shared, values
from .sublayers import layer_norm, linear, rms_norm, softmax


def addition(d: int) -> Flops:
    """x + F(norm(x)): the norm, the addition, and the sum of two gradients of x."""
    return rms_norm(d) + elementwise(d, d)


def hyper_connection(d: int, streams: int) -> Flops:
    """The mixing of hyper-connections around one sublayer, with the norm before it.

    n streams: layer norms of n·d; maps to n·(n + 2) weights; a product with Aᵀ, n·(n + 1)·d
    multiply–adds; the sublayer's output joined to n streams.
    """
    n = streams
    weights = n * linear(d, n + 1) + n * linear(d, 1) + elementwise(3, 6) * (n * (n + 2))
    mixing = product(n * (n + 1) * d) + shared((n + 1) * d)
    # The normalised state has two maps, the state itself two users.
    return n * layer_norm(d) + weights + mixing + joining(d, n) + rms_norm(d) + 2 * shared(n * d)


def weighted_addition(d: int, streams: int) -> Flops:
    """X + F(h) (β v)ᵀ of `expanded`: gate and values of the context, their product, `joining`, and
    sums of gradients of h and X."""
    n = streams
    weights = projected_gates(d, 1, None) + values(d, n, sigmoid=False) + elementwise(n, 2 * n)
    return weights + joining(d, n) + shared(2 * d + n * d)


def joining(d: int, streams: int) -> Flops:
    """X + b F(x)ᵀ: the output joined to n streams, 2·n·d forward, 4·n·d backward."""
    return elementwise(2 * streams * d, 4 * streams * d)


def weighted_read(d: int, streams: int) -> Flops:
    """Σ_j a_j X_j with a = sigmoid(s W rms(vec X) + c) + ε: a norm of n·d numbers, a map to n
    weights, and their sum, 2·n·d forward, 3·n·d backward; a sum of two gradients of X."""
    n = streams
    weights = rms_norm(n * d, weight=False) + linear(n * d, n) + elementwise(4 * n, 6 * n)
    return weights + elementwise(2 * n * d, 3 * n * d) + shared(n * d)


def independent_connection(d: int, streams: int) -> Flops:
    """`weighted_read`, n more weights for `joining`, and the norm before the sublayer."""
    n = streams
    written = linear(n * d, n) + elementwise(5 * n, 7 * n) + joining(d, n)
    return weighted_read(d, n) + written + shared(n * d) + rms_norm(d)


def manifold_connection(d: int, streams: int) -> Flops:
    """`independent_connection`, a map to n² weights more, `sinkhorn`, and n²·d multiply–adds."""
    n = streams
    weights = linear(n * d, n * n) + elementwise(3, 4) * (n * n) + n * softmax(n) + sinkhorn(n)
    return independent_connection(d, n) + weights + product(n * n * d)


def sinkhorn(streams: int) -> Flops:
    """39 divisions by sums of rows or columns (20 iterations, the first by columns alone): each
    2·n² + n forward, 7·n² backward."""
    return elementwise(39 * (2 * streams**2 + streams), 39 * 7 * streams**2)


def gated_read(d: int, streams: int, rank: int) -> Flops:
    """mean_j A_j ∘ X̃_j: a norm of n·d numbers, gates of a rank, 3·n·d forward, 6·n·d backward."""
    width = streams * d
    gates = linear(width, rank) + linear(rank, width) + elementwise(2 * rank, 3 * rank)
    return rms_norm(width) + gates + elementwise(3 * width, 6 * width)


def gated_connection(d: int, streams: int, rank: int) -> Flops:
    """`gated_read`, a map to the weights of `joining`, and sums of gradients of X̃ and X."""
    n = streams
    written = linear(n * d, n) + elementwise(3 * n, 4 * n) + joining(d, n)
    return gated_read(d, n, rank) + written + 2 * shared(n * d)


def attention_read(d: int, sums: int) -> Flops:
    """Σ_i softmax_i(q · rms(v_i)) v_i of so many v: (6·sums − 1)·d forward, 11·sums·d backward."""
    small = softmax(sums) + elementwise(3 * sums, 10 * sums)
    return elementwise((6 * sums - 1) * d, 11 * sums * d) + small


def attention_residual(d: int, sublayers: int, per_block: int) -> Flops:
    """The reads after every sublayer, its norm, and the sums of outputs and of their gradients."""
    sums = [1 + -(-index // per_block) for index in range(1, sublayers + 1)]
    added = sublayers - (sums[-1] - 1)  # outputs that are added to an earlier one
    total = sublayers * rms_norm(d) + elementwise(added * d, 0)
    for number in sums:
        total = total + attention_read(d, number)
    return total + shared((sum(sums) + added - sublayers) * d)
