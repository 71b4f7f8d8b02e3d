"""The cost of runs in steps, tokens, FLOPs and seconds of training, up to a record and in all."""

from __future__ import annotations

from collections.abc import Sequence

from ddl.errors import listed
from ddl.lab.config import TrainConfig
from ddl.lab.config.comparing import Over
from ddl.lab.train.json_lines import Record, number

from .runs import Run

LABELS: dict[Over, str] = {
    "steps": "step",
    "tokens": "tokens",
    "flops": "FLOPs",
    "seconds": "seconds of training",
}
CAPTION = (
    "Between points a curve is interpolated. A shorter run, whose schedule ends at an earlier\n"
    "point, would have another loss there."
)
MOST_NAMED = 4  # runs that a sentence names
EQUAL = 0.01  # share by which equal FLOPs may differ: steps are whole
EQUAL_SECONDS = 0.1  # the same of seconds, which are measured


def per_step(config: TrainConfig, over: Over) -> float | None:
    """The length of a step of a run on this axis; None for seconds, which are measured."""
    scales = {"steps": 1, "tokens": config.tokens_per_step, "flops": config.flops_per_step}
    return scales.get(over)


def places(run: Run, over: Over) -> list[float | None]:
    """The place of each of the run's records on the axis; None where it is not known."""
    if run.config is None:
        return [None] * len(run.records)
    scale = per_step(run.config, over)
    if scale is None:
        return seconds_of(run.records, run.config.tokens_per_step)
    return [record["step"] * scale for record in run.records]


def seconds_of(records: Sequence[Record], tokens_per_step: int) -> list[float | None]:
    """The seconds of training before each record: as recorded, or by the tokens per second of the
    steps so far, which is all that runs of earlier versions have; None if there is a gap."""
    known: dict[int, float | None] = {0: 0.0}
    spent: float | None = 0.0
    last = 0
    for record in sorted(records, key=lambda record: record["step"]):
        step, recorded = record["step"], number(record, "seconds")
        if recorded is not None:
            spent = recorded
        elif "tokens_per_second" in record and step > last:
            speed = number(record, "tokens_per_second")
            if spent is not None:
                spent = spent + (step - last) * tokens_per_step / speed if speed else None
        else:
            continue
        known[step], last = spent, step
    return [known.get(record["step"]) for record in records]


def without(runs: Sequence[Run], over: Over) -> list[str]:
    """A sentence on the runs with records that have no place on this axis; none without any."""
    missing = [r.name for r in runs if r.records and all(p is None for p in places(r, over))]
    if not missing:
        return []
    return [f"Without {LABELS[over]}, which are not recorded: {listed(missing, MOST_NAMED)}."]


# --- whole runs -----------------------------------------------------------------------------------


def total_flops(config: TrainConfig) -> float:
    """FLOPs of a run when its schedule ends."""
    return config.steps * config.flops_per_step


def total_seconds(run: Run) -> float | None:
    """Seconds of training at the last step of a finished run; None if they are not known."""
    at_end = [
        seconds
        for record, seconds in zip(run.records, places(run, "seconds"), strict=True)
        if record["step"] == run.options.steps and seconds is not None
    ]
    return at_end[-1] if run.finished and at_end else None


def close(one: float | None, other: float | None, most: float = EQUAL) -> bool:
    """Whether two totals are known and differ by at most this share of the second."""
    return one is not None and other is not None and abs(one - other) <= most * other


def equal_cost(one: Run, other: Run) -> bool:
    """Whether two runs cost the same at the end of their schedules, in FLOPs or in seconds."""
    if close(total_flops(one.options), total_flops(other.options)):
        return True
    return close(total_seconds(one), total_seconds(other), EQUAL_SECONDS)
