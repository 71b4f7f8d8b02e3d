"""Recipes: the options with which other code trains, as options of ours. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from typing import Any

from ddl.models.config import READS, GPTConfig, idle_options

from .training import TrainConfig

__all__ = ["RECIPES", "paper_code"]

# The published code's defaults where they are not ours; paper/options.py maps their names.
PAPER_CODE: dict[str, Any] = {
    "eps_k": 1e-5,
    "value": "sigmoid",
    "value_scale": 4.0,
    "value_from": "compressed",
    "compress_parameterization": "factored",
    "initial_weights": "paper-code",
}


def paper_code(config: TrainConfig, given: Mapping[str, Any] | None = None) -> TrainConfig:
    """Return `config` with the options that the papers' published code has by default.

    These are ε_k = 1e-5, values 4·sigmoid(W x + b) of the raw read x, factored compressors, the
    initial weights, and weight decay for whatever has two or more dimensions. That code has no
    trainer: the decay is the rule of nanoGPT, on which the papers say they build.

    given: fields of GPTConfig that win over the recipe. An option of the recipe that has no effect
    beside them keeps its default. Raises InputError if they do not fit each other.
    """
    given = dict(given or {})
    model: dict[str, Any] = {
        field.name: getattr(config.model, field.name) for field in fields(GPTConfig)
    }
    model |= PAPER_CODE | given
    if model["residual"] in READS and READS[model["residual"]][0] == "channel":
        # There, too, ddl-cc's convolution spans all value channels by default.
        model |= {"compress_kernel_size": model["value_channels"]} | given
    chosen = {*PAPER_CODE, "compress_kernel_size"} - given.keys()
    model |= {name: getattr(GPTConfig, name) for name in chosen & idle_options(model)}
    decayed = replace(config.optim, decay="matrices")
    return replace(config, model=GPTConfig(**model), optim=decayed)


RECIPES: dict[str, Callable[[TrainConfig, Mapping[str, Any]], TrainConfig]] = {
    "paper-code": paper_code
}
