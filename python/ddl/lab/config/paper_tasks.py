"""The tasks that the papers evaluate, and which of a task's metrics their tables show."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ddl.options import is_number

# The tasks of the papers' tables, by lm-eval's names, and their numbers of shots.
PAPER = (
    "arc_challenge", "arc_easy", "hellaswag", "openbookqa",
    "piqa", "sciq", "social_iqa", "winogrande",
)  # fmt: skip
PAPER_SHOTS = (0, 1)

# The papers do not say which metric they show. Their 0-shot scores on SciQ and ARC-Easy are those
# of acc_norm, so it is taken where a task has it; Social IQA and WinoGrande have acc alone.
METRICS = ("acc_norm", "acc")
LARGEST_SCORE = 1e12  # of a score: perplexities are below


def metric_of(results: Mapping[str, Any]) -> tuple[str, float] | None:
    """Return name and value of the metric to show from lm-eval's results of one task.

    acc_norm, else acc, in percent, as in the papers' tables; for a task without either its first
    metric, as it is. None if that is no number, or no accuracy: another metric in its place would
    be compared with it.
    """
    values = {
        key.split(",")[0]: value
        for key, value in results.items()
        if "," in key and "_stderr," not in key
    }
    for name in (*METRICS, *values):
        if name in values:
            value = values[name]
            if name in METRICS:
                return (name, 100 * value) if _is_score(value) and 0 <= value <= 1 else None
            return (name, value) if _is_score(value) else None
    return None


def _is_score(value: Any) -> bool:
    """Whether a value is a number that a task may have as its score; NaN is not."""
    return is_number(value) and abs(value) < LARGEST_SCORE


def paper_average(scores: Mapping[str, float]) -> float | None:
    """The papers' average: the plain mean over their eight tasks; None if one is missing."""
    if not set(PAPER) <= scores.keys():
        return None
    return sum(scores[task] for task in PAPER) / len(PAPER)
