"""Paired differences: variants against a baseline, seed by seed."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from typing import Any, NamedTuple

from ddl.errors import InputError
from ddl.lab.config import TrainConfig
from ddl.lab.train.resume import FREE

from .cost import EQUAL, EQUAL_SECONDS, close, total_flops, total_seconds
from .runs import Run
from .student import Interval, interval

__all__ = ["Difference", "Paired", "pair"]

# Options that may differ within a variant: the seed, and those that do not change what is learnt.
IGNORED: dict[str, Any] = {
    field.name: field.default
    for field in fields(TrainConfig)
    if field.name in FREE and field.name != "data"
}


class Difference(NamedTuple):
    """A variant's validation losses against the baseline's.

    loss: mean final validation loss over the variant's own seeds. seeds: those that both have.
    difference: mean of the differences over these, with its 95 % interval; None without any.
    tokens, flops, seconds: of a whole run, over the baseline's; seconds are means over these seeds,
    None where they are not known.
    """

    variant: str
    loss: float
    seeds: list[int]
    difference: Interval | None
    tokens: float = 1.0
    flops: float = 1.0
    seconds: float | None = None


class Paired(NamedTuple):
    """Variants against a baseline, which is the first of them, and sentences for the reader."""

    baseline: str
    variants: list[Difference]
    notes: list[str]


def pair(runs: Sequence[Run], baseline: str | None = None) -> Paired:
    """Pair the finished runs by seed, each variant against the baseline, or the first variant.

    Raises InputError if no run is finished, the baseline is unknown or a variant has a seed twice.
    """
    groups = variants_of([run for run in runs if run.finished])
    if not groups:
        raise InputError("paired", "have runs of `ddl train` that are finished", "none")
    losses = {name: _by_seed(name, group) for name, group in groups.items()}
    first = next(iter(losses)) if baseline is None else baseline
    if first not in losses:
        raise InputError("baseline", f"be one of {', '.join(losses)}", repr(first))
    found = []
    for name in sorted(losses, key=lambda name: name != first):
        ours, theirs = losses[name], losses[first]
        seeds = sorted(ours.keys() & theirs.keys())
        differences = [ours[seed] - theirs[seed] for seed in seeds]
        mean = sum(ours.values()) / len(ours)
        measured = interval(differences) if seeds and name != first else None
        costs = _costs(groups[name], groups[first], seeds)
        found.append(Difference(name, mean, seeds, measured, *costs))
    return Paired(first, found, _verdicts(first, found[1:]) + _notes(runs, found))


def _costs(
    group: Sequence[Run], base: Sequence[Run], seeds: Sequence[int]
) -> tuple[float, float, float | None]:
    """Tokens, FLOPs and seconds of a variant's run over those of the baseline's."""
    ours, theirs = group[0].options, base[0].options
    tokens = (ours.steps * ours.tokens_per_step) / (theirs.steps * theirs.tokens_per_step)
    spent, of_base = (
        [total_seconds(run) for run in runs if run.options.seed in seeds] for runs in (group, base)
    )
    known = [s for s in (*spent, *of_base) if s is not None]
    complete = len(known) == 2 * len(seeds) > 0 and sum(known[len(seeds) :]) > 0
    seconds = sum(known[: len(seeds)]) / sum(known[len(seeds) :]) if complete else None
    return tokens, total_flops(ours) / total_flops(theirs), seconds


def variants_of(runs: Sequence[Run]) -> dict[str, list[Run]]:
    """The runs of `ddl train` by variant: those with the same options except the seed.

    A variant has the name of its runs without the seed, as `ddl sweep` writes it, else that of its
    residual; of its first run if several would have the same.
    """
    groups: dict[TrainConfig, list[Run]] = {}
    for run in runs:
        if run.config is not None:
            groups.setdefault(replace(run.config, seed=0, **IGNORED), []).append(run)
    names = [_name(group) for group in groups.values()]
    return {
        name if names.count(name) == 1 else group[0].name: group
        for name, group in zip(names, groups.values(), strict=True)
    }


def _name(group: Sequence[Run]) -> str:
    stripped = {re.sub(rf"-s{run.options.seed}$", "", run.name) for run in group}
    return stripped.pop() if len(stripped) == 1 else group[0].options.model.residual


def _by_seed(variant: str, group: Sequence[Run]) -> dict[int, float]:
    losses: dict[int, float] = {}
    names: dict[int, str] = {}
    for run in group:
        assert run.final is not None  # it is finished
        seed = run.options.seed
        if seed in losses:
            raise InputError(
                "runs",
                "have each seed of a variant once",
                f"seed {seed} of {variant} in {names[seed]} and {run.name}",
            )
        losses[seed], names[seed] = run.final.loss, run.name
    return losses


def _notes(runs: Sequence[Run], found: Sequence[Difference]) -> list[str]:
    notes = []
    others = [d for d in found[1:] if d.difference is not None]
    unpaired = [d.variant for d in found[1:] if d.difference is None]
    single = [d.variant for d in others if len(d.seeds) == 1]
    if not found[1:]:
        notes.append("There is one variant only, and nothing to compare it with.")
    if single:
        notes.append(
            f"No interval with one seed: {', '.join(single)}. How much the seed alone changes is"
            " not known."
        )
    if unpaired:
        notes.append(f"No seed in common with {found[0].variant}: {', '.join(unpaired)}.")
    if sum(len(d.seeds) > 1 for d in others) > 1:
        notes.append(
            "Each interval is for its variant alone: of 20 without effect about 1 lies off zero."
        )
    left = sum(run.config is not None and not run.finished for run in runs)
    if left:
        notes.append(f"Without the runs that are not finished: {left}.")
    return notes


def _verdicts(baseline: str, others: Sequence[Difference]) -> list[str]:
    """Sentences on who is better at which equal costs; variants without a difference are alike."""
    alike: dict[str, list[str]] = {}
    found = []
    for variant in others:
        if variant.difference is None:
            continue
        mean, low, high = variant.difference
        costs, (better, worse) = _equal_costs(variant), (variant.variant, baseline)
        if mean > 0:
            better, worse = worse, better
        if low is None or high is None:
            found.append(
                f"{costs}, {variant.variant} differs from {baseline} by {mean:+.4f} in one seed."
            )
        elif low <= 0 <= high:
            alike.setdefault(costs, []).append(variant.variant)
        else:
            least, most = sorted((abs(low), abs(high)))
            by = f"{abs(mean):.4f} ({least:.4f} to {most:.4f})"
            found.append(f"{costs}, {better} is better than {worse} by {by}.")
    for costs, names in alike.items():
        found.append(f"{costs}, no difference from {baseline} is clear: {', '.join(names)}.")
    return found


def _equal_costs(variant: Difference) -> str:
    """The costs that a variant shares with the baseline: tokens, FLOPs, else seconds."""
    equal = ["tokens"] if variant.tokens == 1 else []
    equal += [f"FLOPs (within {100 * EQUAL:g} %)"] if close(variant.flops, 1.0) else []
    if not equal and close(variant.seconds, 1.0, EQUAL_SECONDS):
        equal = [f"seconds (within {100 * EQUAL_SECONDS:g} %)"]
    how = " and ".join(f"equal {name}" for name in equal)
    return f"At {how}" if how else "With other tokens and FLOPs"


def as_mapping(difference: Difference) -> Mapping[str, object]:
    """A difference as JSON's values."""
    measured = difference.difference or Interval(0.0, None, None)
    return {
        "variant": difference.variant,
        "validation_loss": difference.loss,
        "seeds": difference.seeds,
        "difference": None if difference.difference is None else measured.mean,
        "low": measured.low,
        "high": measured.high,
        "flops_ratio": difference.flops,
        "seconds_ratio": difference.seconds,
    }
