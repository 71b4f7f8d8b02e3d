"""The task that needs overwriting: what it asks is known, and what it scores is right."""

from __future__ import annotations

import itertools
import json
import random
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from study import recall
from tests.support import ROOT

VARIABLES, SPAN, BLOCK = 5, 12, 240


def test_an_answer_is_what_was_assigned_last() -> None:
    source = recall.statements(random.Random(3), VARIABLES, SPAN)
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
        assert number - at[name] <= SPAN
        assert writes == count[name]
    assert set(value) == set("abcde")
    assert asked == pytest.approx(recall.ASKED * 3000, rel=0.1)


def test_the_text_is_the_same_for_a_seed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recall, "DOCUMENTS", 3)
    monkeypatch.setattr(recall, "STATEMENTS", 50)
    texts = []
    for seed in (0, 0, 7):
        recall.write(tmp_path / "a.jsonl", VARIABLES, SPAN, seed)
        lines = (tmp_path / "a.jsonl").read_text().splitlines()
        assert [len(json.loads(line)["text"]) for line in lines] == [200] * 3
        texts.append(lines)
    assert texts[0] == texts[1] != texts[2]


class Answering:
    """A model that knows the value assigned last, or the first one; block_size BLOCK."""

    config = SimpleNamespace(block_size=BLOCK)

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
    run = SimpleNamespace(finished=True, options=None, parameters=1, final=None)
    monkeypatch.setattr(recall, "read_run", lambda *_: run)
    monkeypatch.setattr(recall, "plain", lambda _: {})
    monkeypatch.setattr(recall, "load", lambda *_: (Answering(overwrites=overwrites), None))
    found = recall.score(Path("run"), VARIABLES, SPAN)
    assert found is not None
    assert found["questions"] == sum(count for _, count in found["by_writes"].values())
    assert found["by_writes"][1][0] == 1.0
    for writes in range(2, recall.MOST_WRITES + 1):
        right, count = found["by_writes"][writes]
        chance = 1 / len(recall.VALUES)
        assert count > 20
        assert right == (1.0 if overwrites else pytest.approx(chance, abs=0.12))
    monkeypatch.setattr(run, "finished", False)
    assert recall.score(Path("run"), VARIABLES, SPAN) is None


def test_its_help() -> None:
    command = [sys.executable, "-m", "study.recall", "--help"]
    said = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert "A task that needs overwriting" in said
