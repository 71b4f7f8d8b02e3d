"""`evaluate` is `ddl eval`; it imports lm-eval only after all cheap checks."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime, timezone
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ddl.errors import InputError
from ddl.files import write_text
from ddl.lab.config import EvalConfig
from ddl.lab.config.paper_tasks import PAPER, PAPER_SHOTS
from ddl.lab.load import load_for_transformers

from . import subject

if TYPE_CHECKING:
    from .harness import Harness

Record = dict[str, Any]

# Parts of lm-eval's results that a record keeps: those for its tables, and how prompts were made.
KEPT = (
    "results", "groups", "group_subtasks", "versions", "n-shot", "n-samples", "higher_is_better",
    "configs",
)  # fmt: skip


def evaluate(config: EvalConfig) -> Record:
    """Score a model on lm-eval's tasks, write the record as JSON, and return it.

    The record names the model (path, hash of the weights, size) and the file (`out`). `runs` has
    lm-eval's results for each number of shots, with the number of `requests` and of those
    `truncated` because they were longer than the model's context. Raises InputError if model, tasks
    or `out` cannot be used; then nothing was written.
    """
    subject.check(config.model, config.checkpoint)
    started = datetime.now(timezone.utc)
    out = config.out or config.model / f"eval-{started:%Y%m%d-%H%M%S}.json"
    if out.exists():
        raise InputError("out", "be a new file", f"{out}, which exists")
    if not (out.parent.is_dir() and os.access(out.parent, os.W_OK)):
        raise InputError("out", "be in a directory that can be written to", out)
    from . import tasks

    with _quiet():
        names, shots = _requested(config)
        manager = tasks.index(names, config.include_path)
        names = tasks.resolve(names, manager)
        loaded = tasks.load(names, manager)  # before the model, because data may be missing
        model = _harness(config)
        runs = []
        for number, shot in enumerate(shots):
            if number:  # reload: lm-eval stores the number of shots in its tasks and keeps a 0
                loaded = tasks.load(names, manager)
            runs.append(score(model, loaded, manager, num_fewshot=shot, limit=config.limit))
    record = {
        "model": subject.identity(config.model, config.checkpoint, model.model)
        | {"context": model.max_length},
        "out": str(out),
        "tasks": list(config.tasks),
        "limit": config.limit,
        "batch_size": config.batch_size,
        "device": str(model.device),
        "date": started.isoformat(timespec="seconds"),
        "versions": {name: version(name) for name in ("ddl-rs", "lm_eval", "torch")},
        "runs": runs,
    }
    _write(record, out)
    return record


def score(
    model: Harness,
    tasks: Sequence[Any],
    manager: Any,
    *,
    num_fewshot: int | None = None,
    limit: int | None = None,
    samples: bool = False,
) -> Record:
    """Score a model on loaded tasks and return lm-eval's results.

    num_fewshot: worked examples before each question; None for the task's default. limit: examples
    per task; None for all. samples: also keep every example's requests and responses.
    """
    import lm_eval  # type: ignore[import-untyped]

    requests, truncated = model.requests, model.truncated
    try:
        results = lm_eval.simple_evaluate(
            model=model,
            tasks=list(tasks),
            num_fewshot=num_fewshot,
            batch_size=model.batch_size,
            limit=limit,
            log_samples=samples,
            task_manager=manager,
        )
    except (ValueError, AssertionError) as error:  # these two mistakes are known only by their text
        if str(error).startswith("Duplicate task"):
            raise InputError("tasks", "have each task once", error) from error
        if num_fewshot and "sample" in str(error).lower():
            raise InputError(
                "num_fewshot",
                "be at most as many as the tasks have worked examples",
                f"{num_fewshot}: {error}",
            ) from error
        raise
    kept = {key: results[key] for key in KEPT if key in results}
    if samples:
        kept["samples"] = results["samples"]
    return {
        "num_fewshot": num_fewshot,
        "requests": model.requests - requests,
        "truncated": model.truncated - truncated,
        **kept,
    }


def tables(record: Record) -> str:
    """lm-eval's tables of a record, one per number of shots, each under a line with the model."""
    from lm_eval.utils import make_table  # type: ignore[import-untyped]

    model = record["model"]
    parts = []
    for run in record["runs"]:
        shots = run["num_fewshot"]
        examples = "as many examples as each task asks for" if shots is None else f"{shots}-shot"
        limit = "" if record["limit"] is None else f", the first {record['limit']} examples of each"
        parts.append(f"{model['path']}, {model['parameters']:,} parameters: {examples}{limit}")
        parts.append(make_table(run))
        if run.get("groups"):
            parts.append(make_table(run, "groups"))
        if run["truncated"]:
            parts.append(
                f"Longer than the model's context of {model['context']} tokens, so that they lost"
                f" their beginning: {run['truncated']} of {run['requests']} requests"
            )
    return "\n".join(parts)


def _requested(config: EvalConfig) -> tuple[list[str], Sequence[int | None]]:
    """Return the names of the tasks, and the numbers of shots."""
    named = [name for entry in config.tasks for name in entry.split(",") if name]
    names = [task for name in named for task in (PAPER if name == "paper" else (name,))]
    paper = "paper" in named and config.num_fewshot is None
    return names, PAPER_SHOTS if paper else (config.num_fewshot,)


def _harness(config: EvalConfig) -> Harness:
    from .harness import Harness

    model, tokenizer = load_for_transformers(
        config.model, config.device, checkpoint=config.checkpoint, argument="model"
    )
    return Harness(model, tokenizer, config.batch_size)


@contextmanager
def _quiet() -> Iterator[None]:
    """Show errors only: the libraries warn of intended things, some for every request."""
    from lm_eval import evaluator

    names = ("lm_eval", "datasets", "transformers.tokenization_utils_base")
    loggers = [logging.getLogger(name) for name in names]
    before = [logger.level for logger in loggers]
    ask_git = evaluator.get_git_commit_hash
    # lm-eval runs git for the current folder's commit, which prints "fatal" outside a repository.
    evaluator.get_git_commit_hash = lambda: None
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        evaluator.get_git_commit_hash = ask_git
        for logger, level in zip(loggers, before, strict=True):
            logger.setLevel(level)


def _write(record: Record, out: Path) -> None:
    from lm_eval.utils import handle_non_serializable

    text = json.dumps(record, indent=2, default=handle_non_serializable, ensure_ascii=False)
    write_text(out, text + "\n")
