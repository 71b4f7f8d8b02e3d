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

from .config import STREAMS, GPTConfig

OF_VALUES = re.compile(r"trunk\.residuals\.\d+\.value\.(weight|bias)$")
ADDED = re.compile(r"\b(?:_orig_mod|_checkpoint_wrapped_module|_fsdp_wrapped_module|module)\.")


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
    for given, parameter in model.named_parameters():
        name = plain_name(given)
        if name not in widths:
            must = "the model's own while the rates follow the parameterization"
            raise ValueError(f"`{given}` must be a parameter of {must}, got another module's")
        scale = 1 / widths[name]
        rewrites = config.residual in STREAMS
        if OF_VALUES.match(name) and rewrites and config.value == "linear":
            scale *= math.sqrt(config.times_as_wide)  # that of sigmoid is outside of it
        yield parameter, scale, 1 / (config.times_as_wide * config.times_as_deep)


def plain_name(name: str) -> str:
    """The name without what wrappers of modules, parametrizations and pruning add to it."""
    return re.sub(
        r"parametrizations\.(\w+)\.original\d*$|(?<=\w)_orig$", r"\1", without_wrappers(name)
    )


def without_wrappers(name: str) -> str:
    """The name without the prefixes that torch.compile, DDP, FSDP and checkpointing add to it."""
    return ADDED.sub("", name)


def _inputs_of(config: GPTConfig, make: Callable[[GPTConfig], nn.Module]) -> dict[str, float]:
    """By name of a parameter: how many times as many inputs it has as at base_width; 1 unless it is
    a matrix, or of the embedding, which sums over no features."""
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
            if parameter.ndim == 2 and name != "wte.weight"
            else 1.0
            for (name, parameter), other in pairs
        }
