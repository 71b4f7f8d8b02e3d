"""Facts about a run, or an exported model, from the files in its directory; no model is loaded."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from ddl.errors import InputError, first_line
from ddl.lab.config import GPTConfig, TrainConfig
from ddl.lab.config.paper_tasks import metric_of, paper_average
from ddl.lab.train import checkpoint
from ddl.lab.train.checkpoint import Manifest
from ddl.lab.train.json_lines import Record, number, perplexity
from ddl.lab.train.runs import DIVERGED, LAST, TOKENIZER, RunDirectory, load_config
from ddl.options import is_whole
from ddl.paths import PathKind, require_kind

KINDS = (PathKind.RUN, PathKind.DDL, PathKind.DECODER, PathKind.HUGGING_FACE)
EVALUATIONS = "eval-*.json"  # as `ddl eval` names them: by date and time


class Point(NamedTuple):
    """A validation loss in nats per token, NaN if the run diverged, and its step."""

    step: int
    loss: float

    @property
    def perplexity(self) -> float:
        return perplexity(self.loss)


class Evaluation(NamedTuple):
    """Scores of tasks with one number of shots: accuracies in percent.

    shots: None for the tasks' own. limit: only so many examples of each task were scored; None for
    all. metrics: the metric of each score.
    """

    shots: int | None
    limit: int | None
    scores: dict[str, float]
    metrics: dict[str, str]

    @property
    def average(self) -> float | None:
        """The papers' average over their eight tasks; None if one of them is missing."""
        return paper_average(self.scores)


@dataclass(frozen=True)
class Run:
    """A run to compare; None stands for what its files do not say.

    config: None for an exported model. step: the last one recorded or saved. final, best: the last
    and the lowest validation loss. tokens_per_second: the median of the records. peak_memory:
    bytes. data: a checksum of the corpus. vocabulary: the tokenizer, as JSON. records: of
    metrics.jsonl.
    """

    path: Path
    name: str
    config: TrainConfig | None = None
    step: int | None = None
    final: Point | None = None
    best: Point | None = None
    bits_per_byte: float | None = None
    parameters: int | None = None
    tokens_per_second: float | None = None
    peak_memory: float | None = None
    evaluations: tuple[Evaluation, ...] = ()
    data: str | None = None
    vocabulary: str | None = None
    records: tuple[Record, ...] = ()

    @property
    def options(self) -> TrainConfig:
        """The configuration of a run of `ddl train`; do not ask an exported model for it."""
        assert self.config is not None
        return self.config

    @property
    def diverged(self) -> bool:
        """Whether training ended because a number was not finite."""
        lost = self.final is not None and math.isnan(self.final.loss)
        return lost or bool(self.records and DIVERGED in self.records[-1])

    @property
    def finished(self) -> bool:
        """Whether the run did its last step, with a validation loss that is a number."""
        steps = None if self.config is None else self.config.steps
        return self.final is not None and self.final.step == steps and self.final.loss < math.inf


def read_run(path: Path, name: str) -> Run:
    """Read what a directory says; it may be written to meanwhile, or be of an earlier version.

    Raises InputError if it is neither a run nor a model of Hugging Face's, or a file is damaged.
    """
    kind = require_kind(path, *KINDS, argument="runs")
    evaluated = newest_evaluation(path)
    if kind is not PathKind.RUN:
        parameters = number(evaluated.get("model", {}), "parameters")
        size = None if parameters is None else int(parameters)
        return Run(path, name, parameters=size, evaluations=tuple(_evaluations(evaluated)))
    config, records = load_config(path), RunDirectory(path).metrics.read()
    run = describe_run(path, name, config, records, evaluated)
    return replace(run, vocabulary=_text(path / TOKENIZER))


def describe_run(
    path: Path, name: str, config: TrainConfig, records: Sequence[Record], evaluated: Record
) -> Run:
    """A run of `ddl train`: its configuration, records and newest evaluation.

    The tokenizer, and with it `Run.vocabulary`, is left out.
    """
    validated = [r for r in records if isinstance(r.get("validation_loss"), float | int)]
    points = [Point(r["step"], _loss(r)) for r in validated]
    speeds = list(_numbers(records, "tokens_per_second"))
    last = _last_checkpoint(path)
    return Run(
        path,
        name,
        config,
        step=max([0 if last is None else last.step, *(r["step"] for r in records)]),
        final=points[-1] if points else None,
        best=min((p for p in points if p.loss < math.inf), key=lambda p: p.loss, default=None),
        bits_per_byte=number(validated[-1], "validation_bits_per_byte") if points else None,
        parameters=_parameters(last, config.model),
        tokens_per_second=statistics.median(speeds) if speeds else None,
        peak_memory=max(_numbers(records, "peak_memory"), default=None),
        evaluations=tuple(_evaluations(evaluated)),
        data=None if last is None else last.data,
        records=tuple(records),
    )


def _numbers(records: Sequence[Record], key: str) -> Iterator[float]:
    return (value for value in (number(record, key) for record in records) if value is not None)


def _loss(record: Record) -> float:
    loss = number(record, "validation_loss")
    return math.nan if loss is None else loss


def _parameters(last: Manifest | None, config: GPTConfig) -> int:
    """The number that the last checkpoint says; of a run without, or an older one, the model's."""
    saved = None if last is None else last.parameters
    return parameters_of(config) if saved is None else saved


@lru_cache(maxsize=256)
def parameters_of(config: GPTConfig) -> int:
    """The number of a model's parameters, from a model without memory."""
    import torch  # takes seconds

    from ddl.models import GPT

    try:
        with torch.device("meta"):
            return GPT(config).num_parameters()
    except RuntimeError as error:
        raise InputError(
            "runs", "have models that a machine can hold", first_line(error)
        ) from error


def _last_checkpoint(path: Path) -> Manifest | None:
    """The manifest of the last checkpoint; None without one. A run that goes on may remove a
    checkpoint while it is looked at."""
    for _ in range(2):
        with suppress(InputError):
            found = RunDirectory(path).find_checkpoint(LAST)
            return None if found is None else checkpoint.read_manifest(found)
    return None


def _text(file: Path) -> str | None:
    """The text of a file; None if it does not exist."""
    try:
        return file.read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as error:
        raise InputError("runs", "be readable", f"{file}: {first_line(error)}") from error


def newest_evaluation(path: Path) -> Record:
    """The newest record of `ddl eval` in a directory; empty if there is none.

    Raises InputError if it is damaged.
    """
    files = sorted(path.glob(EVALUATIONS))
    if not files:
        return {}
    text = _text(files[-1]) or ""
    try:
        record = json.loads(text)
        shaped = _is_evaluation(record)
    except (ValueError, RecursionError, KeyError, TypeError, AttributeError):
        shaped = False
    if not shaped:
        raise InputError("runs", "have evaluations of `ddl eval`", files[-1])
    return record


def _is_evaluation(record: Any) -> bool:
    """Whether a record has what is read of it; raises KeyError or TypeError if not, too."""
    runs, limits = record["runs"], [record.get("limit")]
    counts = [*limits, *(run.get("num_fewshot") for run in runs)]
    tasks = [results for run in runs for results in run["results"].values()]
    return (
        isinstance(runs, list)
        and all(count is None or (is_whole(count) and 0 <= count < 10**9) for count in counts)
        and all(isinstance(results, dict) for results in tasks)
    )


def _evaluations(record: Record) -> Iterator[Evaluation]:
    for run in record.get("runs", []):
        shown = {task: metric_of(results) for task, results in run["results"].items()}
        chosen = {task: found for task, found in shown.items() if found is not None}
        scores = {task: value for task, (_, value) in chosen.items()}
        metrics = {task: metric for task, (metric, _) in chosen.items()}
        yield Evaluation(run.get("num_fewshot"), record.get("limit"), scores, metrics)
