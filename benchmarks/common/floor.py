"""The floor of a time: a step whose boundaries only moved their bytes, at the speed of a copy."""

from __future__ import annotations

from typing import Any

from ddl.lab.bench.traffic import boundary


def floor(
    residual: str,
    boundaries: int,
    additive: float,
    gb_s: float,
    *,
    state: int,
    features: int,
    links: float = 0,
) -> float:
    """The ratio to the additive residual if boundaries took only the time to copy their bytes.

    The additive step keeps its measured time; the bytes that a variant moves beyond it are added at
    the bandwidth of a copy. Eager PyTorch moves more bytes than counted for an addition and a norm,
    so a measured eager ratio may exceed this. boundaries: features in all boundaries; additive:
    seconds; state, features, links: as in `boundary`.
    """
    sizes: dict[str, Any] = {"state": state, "features": features, "links": links}
    more = boundary(residual, **sizes) - boundary("additive", **sizes)
    return additive / (additive + more * boundaries / (gb_s * 1e9))


def boundary_features(layers: int, tokens: int, hidden_size: int) -> int:
    """Features in all boundaries of a model.

    The opening read and the expansion together move about as much as one boundary, so there is one
    boundary more than there are sublayers.
    """
    return (2 * layers + 1) * tokens * hidden_size
