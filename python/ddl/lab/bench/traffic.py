"""The bytes that must move. All rates are counted by them.

Every tensor with a row of features per token counts once: forward X, k → X', h; backward G, X, k,
dh → dX, dk; a token read also stores x and loads it again. Values, gates, statistics and parameters
are left out. If an implementation moves more bytes than these, its rate is lower.
"""

from __future__ import annotations


def moved(
    op: str, form: str, m: int, *, rewrites: int = 1, state: int = 1, features: int = 1
) -> tuple[int, int]:
    """Bytes per token and feature of one operator, forward and backward.

    form: of the read (identity, channel, token) or of the expansion (repeat, conv), "" for a
    rewrite. rewrites: n, one after the other; each has a k and a dk. state: bytes of an element of
    X, X', their gradients, and x. features: bytes of an element of k, h, dk and dh. With the
    default sizes of 1 the result is in elements.
    """
    whole = m * state
    if op == "expand":
        again = state if form == "conv" else 0  # x, for the weight's gradient
        return state + whole, whole + state + again  # x, X; G, dx
    forward, backward = whole, 2 * whole  # X; X or G, and dX
    if op != "read":
        directions = rewrites * features
        forward, backward = forward + whole + directions, backward + whole + 2 * directions
    if op != "rewrite":
        saved = state if form == "token" else 0
        forward, backward = forward + features + saved, backward + features + saved
    return forward, backward


def boundary(residual: str, *, state: int = 1, features: int = 1, links: float = 0) -> float:
    """Bytes per token and feature between two sublayers of a model, forward and backward together.

    links: rewrites that the backward applies again, on average; each has a direction.

    The additive residual has an addition and a norm: x, F → x', h and G, x', dh → dx.
    """
    if residual == "additive":
        return (2 * state + 2 * features) + (3 * state + features)
    form = "identity" if residual == "ddl" else "token" if "-tc" in residual else "channel"
    m = 1 if residual == "ddl" else 4
    chain = links * features
    return sum(moved("rewrite_read", form, m, state=state, features=features)) + chain
