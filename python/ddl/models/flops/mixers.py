"""FLOPs per token of a mixer over time, counted as `ddl.reference.delta_rule` computes it."""

from __future__ import annotations

from ddl.layouts import layout_of

from ..config import GPTConfig
from .count import NOTHING, Flops, elementwise, product
from .residuals import compress, projected_gates, shared
from .sublayers import linear, rms_norm

__all__ = ["mixer"]

TAPS = 4


def mixer(config: GPTConfig) -> Flops:
    """The sublayer: five linear maps, convolutions, unit q and k, gates, and the recurrence."""
    assert config.mixer != "attention", "there is a mixer"
    d, size, heads = config.hidden_size, config.head_dim, config.num_heads
    layout = layout_of(config.mixer, config.mixer_n)
    states, outputs = heads * layout.states, heads * max(layout.queries, layout.states)
    q = heads * layout.queries * size
    k, v = (layout.steps * heads * number * size for number in (layout.keys, layout.values))
    y = outputs * size
    maps = sum((linear(d, width) for width in (q, k, v, y)), linear(y, d))
    convolved = compress(q + k + v, 1, "token", TAPS) + elementwise(q + k + v, 2 * (q + k + v))
    unit = rms_norm(q + k, weight=False) + elementwise(q + k, q + k)
    gates = projected_gates(d, layout.steps * states, None)
    decays = decay(config, states)
    ends = rms_norm(y) + elementwise(2 * y, 4 * y)
    of_context = shared(d * (4 if decays == NOTHING else 5))
    of_states = states * recurrence(size, layout.steps, outputs // states, config.mixer_gated)
    return maps + convolved + unit + gates + decays + ends + of_context + of_states


def decay(config: GPTConfig, states: int) -> Flops:
    """g = −exp(a)·softplus(f(h) + b): 2 forward and 4 backward for each, beside the map f."""
    d, size = config.hidden_size, config.head_dim
    match config.mixer_gated:
        case False:
            return NOTHING
        case True:
            return linear(d, states, bias=True) + elementwise(2 * states, 4 * states)
        case _:
            number = states * size
            maps = linear(d, size) + linear(size, number, bias=True)
            return maps + elementwise(2 * number, 4 * number)


def recurrence(size: int, steps: int, queries: int, gated: bool | str) -> Flops:
    """One token of one state S of size² numbers, with as many steps and queries.

    A step: the product kᵀS, and S + k wᵀ: 2·size² forward; backward the gradients of both factors,
    4·size², and a sum in S. The queries are products, and a sum in S. A decay is size² forward and
    3·size² backward.
    """
    numbers = size * size
    step = product(numbers) + elementwise(2 * numbers + 2 * size, 5 * numbers + 4 * size)
    query = product(numbers) + elementwise(size, size)
    decayed = elementwise(numbers, 3 * numbers) if gated else NOTHING
    return steps * step + queries * query + shared(numbers) + decayed
