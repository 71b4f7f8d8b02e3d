"""The models of runs on one text: their losses, and how fast they generate on this machine."""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from rich.console import Console
from rich.progress import Progress, TaskID

from ddl.errors import InputError, first_line
from ddl.lab import machine
from ddl.lab.config import GPTConfig
from ddl.lab.progress import passing_bar
from ddl.lab.timing import Timed, interleave, ratio, ratio_interval
from ddl.models import GPT

from .runs import Run
from .scoring import Advance, Score, read_text, score_run

__all__ = ["Measured", "Ratio", "Speed", "measure"]

MOST_TOKENS = 32  # that are generated in a round
SECONDS = 8.0  # all rounds together, if the fewest are not longer
FEWEST, MOST = 5, 25  # rounds


class Ratio(NamedTuple):
    """A ratio of medians, and the 95 % interval of resampled rounds."""

    ratio: float
    low: float
    high: float


class Speed(NamedTuple):
    """Medians in tokens per second of one sequence, and ratios to those of the first run here.

    prefill: the prompt. generated: the tokens after the first new one, with a cache.
    """

    prefill: float
    prefill_ratio: Ratio
    generated: float
    generated_ratio: Ratio


class Measured(NamedTuple):
    """The runs on a text, by name; those that could not be measured are in the notes.

    bytes: of the text. device: on which the speeds were measured, in float32. prompt, tokens: of
    each round, rounds: their number; 0 if no run was measured.
    """

    text: Path
    bytes: int
    scores: dict[str, Score]
    speeds: dict[str, Speed]
    device: str
    prompt: int
    tokens: int
    rounds: int
    notes: list[str]


def measure(runs: Sequence[Run], text: Path, console: Console) -> Measured:
    """Score every run on the text of a file, one after the other, then time their models.

    Runs with one architecture are timed together, by the model of the first of them, so that
    seeds cost no memory. Raises InputError if the file cannot be read, or no run can be scored.
    """
    content = read_text(text)
    scores: dict[str, Score] = {}
    failed: list[tuple[str, str]] = []  # run and reason
    models: dict[GPTConfig, GPT] = {}
    by_run: dict[str, GPTConfig] = {}
    with passing_bar(console) as bar:
        for run in runs:
            task = bar.add_task(f"loss of {run.name}", total=None)
            try:
                score, model = score_run(run, content, _advance(bar, task))
            except (InputError, MemoryError, torch.OutOfMemoryError) as error:
                failed.append((run.name, first_line(error)))
            else:
                scores[run.name], by_run[run.name] = score, model.config
                models.setdefault(model.config, model)
            bar.remove_task(task)
        if not scores:
            expected = f"have one that can be measured on `data` {text}"
            raise InputError("runs", expected, ": ".join(failed[0]), ("data",))
        notes = [f"Not measured: {name}, because {reason}." for name, reason in failed]
        if len({model.wte.weight.device for model in models.values()}) > 1:
            notes.append("The models are on different devices, so their speeds do not compare.")
        timing = _time(list(models.values()), bar)
    speeds = _speeds(by_run, timing)
    size = len(content.encode("utf-8"))
    return Measured(text, size, scores, speeds, *timing[1:], notes)


class _Timing(NamedTuple):
    """Seconds of prompt and tokens in every round, by architecture; then as in Measured."""

    seconds: dict[GPTConfig, list[tuple[float, ...]]]
    device: str
    prompt: int
    tokens: int
    rounds: int


def _time(models: Sequence[GPT], bar: Progress) -> _Timing:
    """Time all models on prompts of one length, which leaves the shortest context room."""
    block = min(model.config.block_size for model in models)
    prompt = max(1, block // 2)
    tokens = max(1, min(MOST_TOKENS, block - prompt - 1))
    steps = {str(i): _generating(model, prompt, tokens) for i, model in enumerate(models)}
    task = bar.add_task("speed", total=None)
    for step in steps.values():  # compiles, and fills caches
        step()
    round_ = sum(sum(step()) for step in steps.values())
    rounds = max(FEWEST, min(MOST, int(SECONDS / max(round_, 1e-9))))
    bar.update(task, total=rounds)
    found = interleave(steps, rounds, warmup=0, progress=lambda said: bar.advance(task, bool(said)))
    device = models[0].wte.weight.device
    name = machine.cpu_model() if device.type == "cpu" else torch.cuda.get_device_name(device)
    seconds = {model.config: found[str(i)] for i, model in enumerate(models)}
    return _Timing(seconds, name, prompt, tokens, rounds)


def _generating(model: GPT, prompt: int, tokens: int) -> Timed:
    """Generates `tokens` + 1 tokens after a prompt; returns the seconds until the first of them,
    and those of the others."""
    device = model.wte.weight.device
    idx = torch.arange(prompt, device=device)[None] % model.config.vocab_size

    def now() -> float:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter()

    def run() -> tuple[float, ...]:
        first: list[float] = []

        def note() -> None:
            if not first:
                first.append(now())

        started = now()
        model.generate(idx, tokens + 1, temperature=0.0, progress=note)
        return first[0] - started, now() - first[0]

    return run


def _speeds(by_run: Mapping[str, GPTConfig], timing: _Timing) -> dict[str, Speed]:
    seconds, _, prompt, tokens, _ = timing
    base = [list(part) for part in zip(*seconds[next(iter(by_run.values()))], strict=True)]
    found = {}
    for name, config in by_run.items():
        own = [list(part) for part in zip(*seconds[config], strict=True)]
        prefill, generated = (statistics.median(part) for part in own)
        ratios = [Ratio(ratio(b, o), *ratio_interval(b, o)) for b, o in zip(base, own, strict=True)]
        found[name] = Speed(prompt / prefill, ratios[0], tokens / generated, ratios[1])
    return found


def _advance(bar: Progress, task: TaskID) -> Advance:
    return lambda done, of: bar.update(task, completed=done, total=of)
