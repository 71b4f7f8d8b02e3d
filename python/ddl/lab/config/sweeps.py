"""Sweeps: variants × options × seeds as the configurations of runs. Imports no torch.

preset = "tiny"                          # as in `ddl train tiny`; "demo" if left out
out = "runs/sweep"                       # the runs' directory; runs/FILE if left out
seeds = [1, 2, 3]                        # the preset's if left out
[variants.additive]                      # options of `ddl train` under the same names
model.residual = "additive"
[variants.cc]
model.residual = "ddl-cc"
[options]                                # of every run; each value of a list makes runs
optim.lr = [1e-3, 2e-3]
"""

from __future__ import annotations

import difflib
import itertools
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, get_args, get_type_hints

from ddl.errors import InputError, first_line, reason_of
from ddl.models.config import GPTConfig
from ddl.options import check_count
from ddl.paths import at_home

from .presets import PRESETS
from .recipes import RECIPES
from .sweep_runs import Sweep, SweepRun
from .training import TrainConfig

__all__ = ["Sweep", "SweepRun", "parse_sweep", "read_sweep"]

KEYS = ("preset", "recipe", "out", "seeds", "variants", "options")
# Options that the sweep sets for each run, and what sets them.
TAKEN = {"seed": "`seeds`", "out": "`out`", "resume": "the sweep", "overwrite": "the sweep"}
MOST_DOTS = 200  # of keys and numbers
NAME = re.compile(r"[A-Za-z0-9_+][A-Za-z0-9_+.-]*")


# The options of the model at a path, for a run in a directory that may have begun from there.
ModelAt = Callable[[str, Path], GPTConfig]


def read_sweep(file: Path, model_at: ModelAt | None = None) -> Sweep:
    """Read a sweep's TOML file; raise InputError, which names the key in it, if it is not right.

    model_at: as in `parse_sweep`.
    """
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib  # in the extra `train`
    try:
        text = file.read_text(encoding="utf-8")
        _check_dots(file, text)
        values = tomllib.loads(text)
    except InputError:
        raise
    except OSError as error:
        raise InputError("file", "be readable", f"{file}: {reason_of(error)}") from error
    except (ValueError, RecursionError) as error:  # an integer may have too many digits
        raise InputError("file", "be TOML", f"{file}: {first_line(error)}") from error
    try:
        return parse_sweep({"out": f"runs/{file.stem}"} | values, model_at)
    except InputError as error:
        raise InputError.sentence(f"{file}: {error}", (error.argument, *error.others)) from error


def _check_dots(file: Path, text: str) -> None:
    """Refuse a key of thousands of parts: tomllib takes their square, in time and in memory."""
    dots = max((line.count(".") for line in text.splitlines()), default=0)
    if dots > MOST_DOTS:
        raise InputError(
            "file", f"have at most {MOST_DOTS} dots in a line", f"{file}, which has {dots} in one"
        )


def parse_sweep(values: Mapping[str, Any], model_at: ModelAt | None = None) -> Sweep:
    """Make the runs of a sweep from the values of its file; `out` is needed.

    model_at: the options of the model at a path that `init_from` names, for a run in a directory;
    None leaves the preset's.

    Raises InputError if a key is unknown, a value is refused by `TrainConfig`, or two runs would
    have the same name; the message names the key.
    """
    for key in values:
        if key not in KEYS:
            raise InputError(key, f"be one of {', '.join(KEYS)}", "an unknown key")
    base = _base(values)
    out, seeds = _out(values["out"]), _seeds(values.get("seeds", [base.seed]))
    options = _flat(_table(values, "options"), "options.")
    grid = {path: given for path, given in options.items() if _is_list_of_values(path, given.value)}
    fixed = {path: given for path, given in options.items() if path not in grid}
    variants = {}
    for name, table in _variants(values, base).items():
        _check_name(name)
        variants[name] = _flat(table, f"variants.{name}.")
        both = next((path for path in variants[name] if path in grid), None)
        if both is not None:
            key, other = grid[both].key, variants[name][both].key
            raise InputError(key, f"be one value where `{other}` replaces it", "a list")
    combinations = [dict(given) for given in _combinations(grid)]
    runs = []
    for seed in seeds:
        for (name, own), chosen in itertools.product(variants.items(), combinations):
            variant = "-".join([name, *(_part(path, chosen[path].value) for path in chosen)])
            run, given = f"{variant}-s{seed}", fixed | own | chosen
            begun = _with_model(base, given, model_at, out / run)
            config = _config(begun, values.get("recipe"), given)
            if begun is not base:
                _require_same_model(config, begun, given)
            config = replace(config, seed=seed, out=out / run, resume="auto")
            runs.append(SweepRun(run, variant, config))
    _check_different(runs)
    return Sweep(out, tuple(runs))


# --- the keys of the file -------------------------------------------------------------------------


class _Given(NamedTuple):
    """A value, and the key in the file that gives it."""

    key: str
    value: Any


def _base(values: Mapping[str, Any]) -> TrainConfig:
    preset, recipe = values.get("preset", "demo"), values.get("recipe")
    for key, name, known in (("preset", preset, PRESETS), ("recipe", recipe, RECIPES)):
        if not (isinstance(name, str) and name in known) and not (key == "recipe" and name is None):
            raise InputError(key, f"be one of {', '.join(known)}", repr(name))
    return PRESETS[preset]


def _out(value: Any) -> Path:
    if not isinstance(value, str) or not value:
        raise InputError("out", "be a directory", repr(value))
    return at_home(value, argument="out")


def _seeds(value: Any) -> list[int]:
    if not isinstance(value, list) or not value:
        raise InputError("seeds", "be a list of integers", repr(value))
    for seed in value:
        check_count("seeds", seed, least=0)
    if len(set(value)) < len(value):
        raise InputError("seeds", "be different", value)
    return value


def _table(values: Mapping[str, Any], key: str) -> dict[str, Any]:
    table = values.get(key, {})
    if not isinstance(table, dict):
        raise InputError(key, f"be a table, as [{key}]", repr(table))
    return table


def _variants(values: Mapping[str, Any], base: TrainConfig) -> dict[str, dict[str, Any]]:
    variants = _table(values, "variants") or {base.model.residual: {}}
    for name, table in variants.items():
        if not isinstance(table, dict):
            raise InputError(f"variants.{name}", "be a table of options", repr(table))
    return variants


def _flat(table: Mapping[str, Any], key: str) -> dict[str, _Given]:
    """The options in a table of the file, by their names with dots, as in "model.residual"."""
    found = {path: _Given(key + path, value) for path, value in _leaves(table)}
    for path, (written, _) in found.items():
        if path in TAKEN:
            raise InputError(written, f"be left out, because {TAKEN[path]} sets it", "it")
        if path not in HINTS:
            near = difflib.get_close_matches(path, HINTS, n=1)
            hint = f", which is near {near[0]}" if near else ""
            raise InputError(written, "be an option of `ddl train`", f"an unknown one{hint}")
    return found


def _leaves(table: Mapping[str, Any], inside: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in table.items():
        if isinstance(value, dict) and value:
            yield from _leaves(value, f"{inside}{name}.")
        else:
            yield inside + name, value


def _hints(kind: Any, inside: str = "") -> Iterator[tuple[str, Any]]:
    """The type of every option, by its name with dots."""
    hints = get_type_hints(kind)
    for field in fields(kind):
        hint = hints[field.name]
        if is_dataclass(hint):
            yield from _hints(hint, f"{inside}{field.name}.")
        else:
            yield inside + field.name, hint


HINTS = dict(_hints(TrainConfig))


# --- runs -----------------------------------------------------------------------------------------


def _is_list_of_values(path: str, value: Any) -> bool:
    """Whether a value is a list of which each element makes runs; some options are lists."""
    if not isinstance(value, list):
        return False
    return not _is_tuple(path) or (len(value) > 0 and all(isinstance(v, list) for v in value))


def _is_tuple(path: str) -> bool:
    return getattr(HINTS[path], "__origin__", None) is tuple


def _combinations(grid: Mapping[str, _Given]) -> Iterator[dict[str, _Given]]:
    """Every combination of the listed values; options in alphabetical order, so that names do not
    depend on the order in the file."""
    paths = sorted(grid)
    for path in paths:
        if not grid[path].value:
            raise InputError(grid[path].key, "be at least one value", "[]")
    for values in itertools.product(*(grid[path].value for path in paths)):
        yield {p: _Given(grid[p].key, value) for p, value in zip(paths, values, strict=True)}


def _part(path: str, value: Any) -> str:
    """An option as a part of a directory's name, such as "lr0.001"."""
    text = ",".join(map(str, value)) if isinstance(value, list) else str(_typed(path, value))
    return path.rpartition(".")[2] + re.sub(r"[^A-Za-z0-9_+.,-]", "_", text)


def _check_name(name: str) -> None:
    if not NAME.fullmatch(name):
        raise InputError(
            f"variants.{name}",
            "have a name of letters, digits and _+.- that can begin a directory's",
            repr(name),
        )


def _check_different(runs: Sequence[SweepRun]) -> None:
    seen: set[str] = set()
    for run in runs:
        if run.name in seen:
            raise InputError.sentence(
                f"`variants` and `options` must give every run its own name, got {run.name} twice",
                ("variants", "options"),
            )
        seen.add(run.name)


def _with_model(
    base: TrainConfig, given: Mapping[str, _Given], model_at: ModelAt | None, run: Path
) -> TrainConfig:
    """The base with the model from which the run starts, if it starts from one."""
    begun = given.get("init_from")
    if model_at is None or begun is None or begun.value == "None":
        return base
    try:
        start = replace(base, init_from=begun.value)  # which checks it
        assert start.init_from is not None
        return replace(start, model=model_at(start.init_from, run))
    except InputError as error:
        raise error.renamed({"init_from": begun.key}) from error


def _require_same_model(
    config: TrainConfig, begun: TrainConfig, given: Mapping[str, _Given]
) -> None:
    for field in fields(GPTConfig):
        was, now = getattr(begun.model, field.name), getattr(config.model, field.name)
        if was != now:
            key = given.get(f"model.{field.name}", _Given("recipe", None)).key
            raise InputError(
                key,
                (
                    f"leave {field.name} at {was!r}, as in {config.init_from}, whose weights the"
                    " run starts from"
                ),
                repr(now),
            )


def _config(base: TrainConfig, recipe: str | None, given: Mapping[str, _Given]) -> TrainConfig:
    """The base with these options; an InputError names the key in the file."""
    changes: dict[str, dict[str, Any]] = {"": {}, "model": {}, "optim": {}}
    for path, (_, value) in given.items():
        group, _, name = path.rpartition(".")
        changes[group][name] = _typed(path, value)
    try:
        if recipe is not None:
            base = RECIPES[recipe](base, changes["model"])
        model = replace(base.model, **changes["model"])
        optim = replace(base.optim, **changes["optim"])
        return replace(base, model=model, optim=optim, **changes[""])
    except InputError as error:
        named = {path.rpartition(".")[2]: key for path, (key, _) in given.items()}
        raise error.renamed(named) from error


def _typed(path: str, value: Any) -> Any:
    """A value of the file as the option's type: TOML has no None, no tuples, and 1 for 1.0."""
    hint = HINTS[path]
    if value == "None" and type(None) in get_args(hint):
        return None
    if isinstance(value, list) and _is_tuple(path):
        return tuple(value)
    whole = isinstance(value, int) and not isinstance(value, bool)
    return float(value) if whole and (hint is float or float in get_args(hint)) else value
