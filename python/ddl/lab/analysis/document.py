"""A comparison as JSON's values: figures, validation curves, a ranking."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ddl.lab.train.json_lines import number

from .compare import Comparison
from .cost import seconds_of
from .paired import Paired, as_mapping
from .runs import Run
from .tables import ratios

if TYPE_CHECKING:
    from .measured import Measured

__all__ = ["FORMAT", "curve", "document", "ranking"]

FORMAT = 1  # a change that a reader would notice makes it 2


def document(comparison: Comparison, paired: Paired | None = None) -> dict[str, Any]:
    """The comparison as JSON's values; null for what is not known or no finite number."""
    runs, measured = comparison.runs, comparison.measured
    speed = ratios([run.tokens_per_second for run in runs])
    memory = ratios([run.peak_memory for run in runs])
    described = [
        _described(run)
        | {"speed_ratio": speed[i], "memory_ratio": memory[i], "curve": curve(run)}
        | ({} if measured is None else _measured(run, measured))
        for i, run in enumerate(runs)
    ]
    made: dict[str, Any] = {"format": FORMAT, "runs": described, "ranking": ranking(runs)}
    if measured is not None:
        made["data"] = {"path": str(measured.text), "bytes": measured.bytes}
        made["inference"] = {
            "device": measured.device,
            "precision": "float32",
            "prompt": measured.prompt,
            "tokens": measured.tokens,
            "rounds": measured.rounds,
        }
    made["notes"] = comparison.notes + ([] if paired is None else paired.notes)
    if paired is not None:
        variants = [dict(as_mapping(difference)) for difference in paired.variants]
        made["paired"] = {"baseline": paired.baseline, "variants": variants}
    strict: dict[str, Any] = _strict(made)
    return strict


def _strict(value: Any) -> Any:
    """The value with null for numbers that JSON does not have."""
    if isinstance(value, dict):
        return {key: _strict(of) for key, of in value.items()}
    if isinstance(value, list | tuple):
        return [_strict(of) for of in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _described(run: Run) -> dict[str, Any]:
    config, final, best = run.config, run.final, run.best
    return {
        "name": run.name,
        "path": str(run.path),
        "residual": None if config is None else config.model.residual,
        "seed": None if config is None else config.seed,
        "step": run.step,
        "steps": None if config is None else config.steps,
        "finished": run.finished,
        "validation_loss": None if final is None else final.loss,
        "perplexity": None if final is None else final.perplexity,
        "best_validation_loss": None if best is None else best.loss,
        "best_step": None if best is None else best.step,
        "bits_per_byte": run.bits_per_byte,
        "parameters": run.parameters,
        "tokens_per_second": run.tokens_per_second,
        "peak_memory": run.peak_memory,
        "evaluations": [e._asdict() | {"average": e.average} for e in run.evaluations],
    }


def _measured(run: Run, measured: Measured) -> dict[str, Any]:
    """The loss on the text, and the speeds; null for a run that could not be measured."""
    score, speed = measured.scores.get(run.name), measured.speeds.get(run.name)
    if score is None or speed is None:
        return {"data": None, "inference": None}
    return {
        "data": score._asdict() | {"bits_per_byte": score.bits_per_byte},
        "inference": {
            "prefill_tokens_per_second": speed.prefill,
            "prefill_ratio": speed.prefill_ratio._asdict(),
            "generated_tokens_per_second": speed.generated,
            "generated_ratio": speed.generated_ratio._asdict(),
        },
    }


# --- the validation curve -------------------------------------------------------------------------


def curve(run: Run) -> list[dict[str, Any]]:
    """The validation losses of a run in order of their steps, and what it took to get there.

    tokens: that the steps trained on. flops: of their forward and backward passes. seconds: of
    these steps alone; None where they are not known.
    """
    if run.config is None:
        return []
    seconds = seconds_of(run.records, run.config.tokens_per_step)
    pairs = zip(run.records, seconds, strict=True)
    return [
        {
            "step": record["step"],
            "tokens": record["step"] * run.config.tokens_per_step,
            "flops": record["step"] * run.config.flops_per_step,
            "seconds": spent,
            "validation_loss": number(record, "validation_loss"),
            "validation_bits_per_byte": number(record, "validation_bits_per_byte"),
        }
        for record, spent in sorted(pairs, key=lambda pair: pair[0]["step"])
        if "validation_loss" in record
    ]


# --- the ranking ----------------------------------------------------------------------------------


def ranking(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """The runs by their lowest validation loss; difference: to that of the first in the ranking.

    Equal losses share a rank, and the next one leaves out as many. A run without a validation loss
    has no rank and comes last.
    """
    losses = [run.best.loss for run in runs if run.best is not None]
    ordered = sorted(runs, key=lambda run: math.inf if run.best is None else run.best.loss)
    return [
        {
            "rank": None if best is None else 1 + sum(loss < best.loss for loss in losses),
            "name": name,
            "best_validation_loss": None if best is None else best.loss,
            "difference": None if best is None else best.loss - min(losses),
        }
        for name, best in ((run.name, run.best) for run in ordered)
    ]
