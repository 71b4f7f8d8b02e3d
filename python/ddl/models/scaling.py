"""Learning rates by width and depth: what `mup` and `completep` are to an optimizer.

The rules are derived in docs/transfer.md. What a parameter's rate depends on is how many times as
many inputs it sums over as in the model that was tuned, so both models' shapes are compared.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
from torch import nn

from .config import GPTConfig

__all__ = ["learning_rate_scales"]

OF_VALUES = re.compile(r"trunk\.residuals\.\d+\.value\.(weight|bias)$")


def learning_rate_scales(
    config: GPTConfig, model: nn.Module, make: Callable[[GPTConfig], nn.Module]
) -> Iterator[tuple[nn.Parameter, float, float]]:
    """Parameters with the factor of their learning rate, and that of Adam's ε.

    model: a GPT of this config, or another with the same names. make: the class GPT, of which a
    model of this width and one of base_width are made, without memory. Nothing in the standard
    parameterization.
    """
    if config.parameterization == "standard":
        return
    widths = _inputs_of(config, make)
    for name, parameter in model.named_parameters():
        scale = 1 / widths.get(name, 1.0)
        found = OF_VALUES.search(name)
        if found and config.normalize and (found[1] == "weight" or config.value == "linear"):
            scale *= math.sqrt(config.times_as_wide)
        yield parameter, scale, 1 / (config.times_as_wide * config.times_as_deep)


def _inputs_of(config: GPTConfig, make: Callable[[GPTConfig], nn.Module]) -> dict[str, float]:
    """By name of a matrix: how many times as many inputs it has as at base_width."""
    assert config.base_width is not None
    share = config.base_width / config.hidden_size
    base = replace(
        config,
        hidden_size=config.base_width,
        num_heads=round(config.num_heads * share),
        head_size=config.head_dim,
        mlp_size=None if config.mlp_size is None else max(1, round(config.mlp_size * share)),
        parameterization="standard",
        base_width=None,
        base_layers=None,
    )
    with torch.device("meta"):
        pairs = zip(make(config).named_parameters(), make(base).parameters(), strict=True)
        return {
            name: parameter.shape[1] / other.shape[1]
            for (name, parameter), other in pairs
            if parameter.ndim == 2 and name != "wte.weight"  # which sums over no features
        }
