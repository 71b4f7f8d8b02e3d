"""The option `--recipe` of `ddl train`: like a preset, it sets the defaults of other options."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import Any

from ddl.errors import InputError
from ddl.lab.config import RECIPES, TrainConfig
from ddl.options import Mapping, Parameterization, Residual, Value

from .command import parse

HELP = ("-h", "--help")


@dataclass(frozen=True)
class _Model:
    """The options on which it depends which options of a recipe have an effect."""

    residual: Residual | None = None
    value_channels: int | None = None
    mapping: Mapping | None = None
    value: Value | None = None
    compress_parameterization: Parameterization | None = None


@dataclass(frozen=True)
class _Options:
    recipe: str | None = None
    model: _Model = field(default_factory=_Model)


def take_recipe(
    default: TrainConfig, options: list[str], **tyro: Any
) -> tuple[TrainConfig, list[str]]:
    """Return the defaults that `--recipe` among the options makes, and the options still to parse.

    default: the preset. tyro: further arguments of `parse`. Options that a recipe depends on are in
    the defaults then; all others are parsed after it, so they win. Raises InputError for an unknown
    recipe.
    """
    if not any(option.split("=")[0] == "--recipe" for option in options):
        return default, options
    asked = [option for option in options if option in HELP]  # the help is that of all options
    read = [option for option in options if option not in HELP]
    chosen, rest = parse(_Options, read, return_unknown_args=True, **tyro)
    if chosen.recipe not in RECIPES:
        raise InputError("--recipe", f"be {' or '.join(RECIPES)}", repr(chosen.recipe))
    given = {name: value for name, value in vars(chosen.model).items() if value is not None}
    if _is_scaled(rest):
        given["initial_weights"] = "standard"  # the recipe's are those of no other parameterization
    return RECIPES[chosen.recipe](default, given), rest + asked


def _is_scaled(options: list[str]) -> bool:
    """Whether the options choose another parameterization than the standard one."""
    name = "--model.parameterization"
    asked = [value for option, value in itertools.pairwise(options) if option == name]
    asked += [option.partition("=")[2] for option in options if option.startswith(f"{name}=")]
    return any(value != "standard" for value in asked)
