"""The task that needs overwriting: what it asks is known, and what it scores is right."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from ddl.models import GPT
from study import recall, recall_page, records, side_by_side
from study.side_by_side import Job

TASK = recall.Task(block=240, variables=5, span=12)


def test_an_answer_is_what_was_assigned_last() -> None:
    source = recall.statements(random.Random(3), TASK)
    value: dict[str, str] = {}
    at: dict[str, int] = {}
    count: dict[str, int] = {}
    asked = 0
    for number, (text, writes) in enumerate(itertools.islice(source, 3000)):
        name, kind, given, end = text
        assert end == " "
        if kind == "=":
            assert writes is None
            value[name], at[name] = given, number
            count[name] = count.get(name, 0) + 1
            continue
        asked += 1
        assert given == value[name]
        assert number - at[name] <= TASK.span
        assert writes == count[name]
    assert set(value) == set("abcde")
    assert asked == pytest.approx(recall.ASKED * 3000, rel=0.1)


def test_only_answers_are_labels() -> None:
    tokens, written = recall.sequence(7, TASK)
    labels = recall.answers_of(torch.tensor([tokens]))[0].reshape(-1, 4)
    assert len(tokens) == TASK.block
    for row, answer, writes in zip(labels, tokens[2::4], written, strict=True):
        assert row.tolist() == [-100, -100, answer if writes else -100, -100]


class Answering:
    """A model that knows the value assigned last, or the first one."""

    def __init__(self, *, overwrites: bool) -> None:
        self.overwrites = overwrites

    def __call__(self, tokens: Tensor) -> Any:
        logits = torch.zeros(*tokens.shape, 256)
        text, value = bytes(tokens[0].tolist()).decode(), dict[str, str]()
        for first in range(0, len(text), 4):
            name, kind, given, _ = text[first : first + 4]
            if kind == "=" and (self.overwrites or name not in value):
                value[name] = given
            elif kind == "?":
                logits[0, first + 1, ord(value[name])] = 1
        return SimpleNamespace(logits=logits)


@pytest.mark.parametrize("overwrites", [True, False])
def test_the_score(overwrites: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recall, "SCORED", 40)
    model: Any = Answering(overwrites=overwrites)
    found = recall.score(model, TASK, torch.device("cpu"))
    assert found["questions"] == sum(count for _, count in found["by_writes"].values())
    assert found["by_writes"][1][0] == 1.0
    for writes in range(2, recall.MOST_WRITES + 1):
        right, count = found["by_writes"][writes]
        chance = 1 / len(recall.VALUES)
        assert count > 20
        assert right == (1.0 if overwrites else pytest.approx(chance, abs=0.15))


def test_runs_are_planned_done_and_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three rates or more on a seed, then three seeds with the best."""

    def run_here(plan: Callable[[], Iterable[Job]], processes: int, seconds: float) -> int:
        while left := [job for job in plan() if job.name not in records.by_name(job.out)]:
            records.keep(left[0].out, left[0].work())
        return 0

    monkeypatch.setattr(side_by_side, "run", run_here)
    small = replace(recall.TIME["deltanet"], hidden_size=32, num_heads=2, num_layers=1)
    task = recall.Task(40, 3, 6)
    compared = recall.Compared({"a": small}, [task], (3e-3, 6e-3, 1.2e-2))
    monkeypatch.setattr(recall, "SETS", {"time": compared})
    monkeypatch.setattr(recall, "STEPS", 3)
    monkeypatch.setattr(recall, "SCORED", 4)
    assert recall.main(["time", "--records", str(tmp_path)]) == 0
    found = list(records.by_name(tmp_path / "time.jsonl").values())
    _, best = recall.tuned("a", compared, found)
    assert [r["lr"] for r in found if r["seed"] != 101] == [best] * 3
    assert {r["seed"] for r in found} == {1, 2, 3, 101}
    assert all(r["parameters"] == found[0]["parameters"] for r in found)


def test_rates_are_tried_until_the_best_lies_between_others() -> None:
    """Accuracy by rate, and what is tried next; a rate as good as its neighbour is good enough."""
    compared = recall.Compared({}, [TASK], (3e-3, 6e-3, 1.2e-2))
    for by_rate, expected in (
        ({}, ([3e-3, 6e-3, 1.2e-2], None)),
        ({3e-3: 0.9, 6e-3: 0.5}, ([3e-3, 6e-3, 1.2e-2], None)),
        ({3e-3: 0.5, 6e-3: 0.9, 1.2e-2: 0.4}, ([3e-3, 6e-3, 1.2e-2], 6e-3)),
        ({3e-3: 0.9, 6e-3: 0.5, 1.2e-2: 0.4}, ([1.5e-3, 3e-3, 6e-3, 1.2e-2], None)),
        ({1.5e-3: 0.8, 3e-3: 0.9, 6e-3: 0.5, 1.2e-2: 0.4}, ([1.5e-3, 3e-3, 6e-3, 1.2e-2], 3e-3)),
        ({3e-3: 0.4, 6e-3: 0.5, 1.2e-2: 0.9}, ([3e-3, 6e-3, 1.2e-2, 2.4e-2], None)),
        ({3e-3: 1.0, 6e-3: 1.0, 1.2e-2: 1.0}, ([3e-3, 6e-3, 1.2e-2], 3e-3)),
    ):
        common = {"variant": "a", "task": vars(TASK), "seed": recall.TUNED_ON}
        kept = [{**common, "lr": lr, "accuracy": found} for lr, found in by_rate.items()]
        other = {**common, "seed": 1, "lr": 5.0, "accuracy": 1.0}
        assert recall.tuned("a", compared, [*kept, other]) == expected


def test_models_of_a_set_are_equal_in_size() -> None:
    """Over time: parameters within 0.3 %, and numbers of the states."""
    models = {name: GPT(config) for name, config in recall.TIME.items()}
    sizes = [model.num_parameters() for model in models.values()]
    assert max(sizes) / min(sizes) < 1.003
    states = set()
    for model in models.values():
        mixer = model.trunk.sublayers[0].mixer
        states.add(mixer.heads * mixer.layout.states * mixer.head_size**2)
    assert len(states) == 1


def test_the_page_is_current() -> None:
    assert recall_page.main(["--check"]) == 0


def test_the_table_of_some_records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recall, "RECORDS", tmp_path)
    task = recall.SETS["time"].tasks[0]
    assert recall_page.table("time") == "Not trained yet."
    lines = [
        {
            "name": f"{variant}-{seed}-{lr}",
            "variant": variant,
            "task": vars(task),
            "lr": lr,
            "seed": seed,
            "parameters": 1000,
            "accuracy": accuracy + (0.01 * seed if lr == 0.006 else -0.1),
            "by_writes": {"1": [1.0, 10], "2": [0.5, 30], "8": [0.25, 10]},
            "processor_seconds": 1800,
            "processor": "AVX2",
        }
        for variant, accuracy, seeds in (
            ("deltanet", 0.5, (101, 1, 2, 3)),
            ("multi-kv", 0.7, (101, 1, 2, 3)),
            ("multi-value", 0.7, (101, 1)),  # not yet all
        )
        for seed in seeds
        for lr in (recall.SETS["time"].rates if seed == recall.TUNED_ON else (0.006,))
    ]
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (tmp_path / "time.jsonl").write_text(text)
    head, _, *rows, _, end = recall_page.table("time").splitlines()
    assert head.count("|") == rows[0].count("|") == rows[1].count("|")
    assert len(rows) == 2
    assert "| 0.520 (0.510–0.530) | 1.000 |  |  |" in rows[0]
    assert "| 0.720 (0.710–0.730) | 1.000 | **+0.200** | +0.200 to +0.200 |" in rows[1]
    assert "in 9.5 hours of a core (AVX2)" in end
