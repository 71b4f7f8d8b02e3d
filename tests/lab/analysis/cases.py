"""Run directories that were never trained: a configuration, records, and what `ddl eval` leaves."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ddl.lab.train.runs import RunDirectory
from ddl.models.tokenizers import ByteTokenizer
from tests.support.train_cases import short

METRICS = {"social_iqa": ("acc",), "winogrande": ("acc",)}  # others have acc_norm, too


def make_run(
    path: Path, residual: str = "additive", losses: Sequence[Any] = (2.5,), **changes: Any
) -> Path:
    """A finished run with these validation losses, evenly over its steps."""
    config = replace(short(path, residual, **{"steps": 6} | changes), out=path)
    run = RunDirectory.create(config, ByteTokenizer())
    for number, loss in enumerate(losses, start=1):
        step = config.steps * number // len(losses)
        speed = {"tokens_per_second": 1000.0 * number, "peak_memory": 10**9}
        run.metrics.append({"step": step, "loss": loss} | speed)
        bits = {} if loss is None else {"validation_bits_per_byte": loss * 1.5}
        run.metrics.append({"step": step, "validation_loss": loss} | bits)
    return path


def write_evaluation(
    directory: Path,
    shots: Mapping[int | None, Mapping[str, float]],
    *,
    name: str = "eval-20261123-101500.json",
    limit: int | None = None,
) -> Path:
    """An evaluation as `ddl eval` writes it; scores in percent, by the papers' metric."""
    runs = [
        {"num_fewshot": number, "results": _results(scores)} for number, scores in shots.items()
    ]
    record = {"model": {"path": str(directory), "parameters": 123}, "limit": limit, "runs": runs}
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / name
    path.write_text(json.dumps(record), encoding="utf-8")
    return path


def _results(scores: Mapping[str, float]) -> dict[str, Any]:
    """lm-eval's: acc is another number where acc_norm is to be shown."""
    results: dict[str, Any] = {}
    for task, score in scores.items():
        shown = METRICS.get(task, ("acc_norm",))[0]
        results[task] = {"alias": task, "acc,none": 0.01, "acc_stderr,none": 0.5}
        results[task] |= {f"{shown},none": score / 100, f"{shown}_stderr,none": 0.01}
    return results
