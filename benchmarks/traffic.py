"""The bytes that must move: what rates are counted by, and the floor under every time.

Counted are the tensors with a row of features per token, each once: forward X, k → X', h; backward
G, X, k, dh → dX, dk; a token read also stores x and loads it again. Values, gates, statistics and
parameters are left out, and so is what an implementation moves beyond that: it shows as a lower
rate.
"""

from __future__ import annotations


def moved(op: str, form: str, m: int, *, state: int = 1, features: int = 1) -> tuple[int, int]:
    """Bytes per token and feature of one operator, forward and backward.

    form: of the read (identity, channel, token) or of the expansion (repeat, conv), "" for a
    rewrite. state: bytes of an element of X, X', their gradients, and x. features: of k, h, dk and
    dh. With sizes of one, elements are counted.
    """
    whole = m * state
    if op == "expand":
        again = state if form == "conv" else 0  # x, for the weight's gradient
        return state + whole, whole + state + again  # x, X; G, dx
    forward, backward = whole, 2 * whole  # X; X or G, and dX
    if op != "read":
        forward, backward = forward + whole + features, backward + whole + 2 * features
    if op != "rewrite":
        saved = state if form == "token" else 0
        forward, backward = forward + features + saved, backward + features + saved
    return forward, backward


def boundary(residual: str, *, state: int = 1, features: int = 1) -> int:
    """Bytes per token and feature between two sublayers of a model, forward and backward together.

    The additive residual has an addition and a norm: x, F → x', h and G, x', dh → dx.
    """
    if residual == "additive":
        return (2 * state + 2 * features) + (3 * state + features)
    form = "identity" if residual == "ddl" else "token" if "-tc" in residual else "channel"
    m = 1 if residual == "ddl" else 4
    return sum(moved("rewrite_read", form, m, state=state, features=features))
