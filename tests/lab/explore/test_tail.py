"""Files that grow are read piece by piece; files that are replaced are read again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ddl.errors import InputError
from ddl.lab.explore.tail import Cached, Tail


def line(step: int, **fields: Any) -> str:
    return json.dumps({"step": step, **fields}) + "\n"


@pytest.fixture
def tail(tmp_path: Path) -> Tail[int]:
    return Tail(tmp_path / "metrics.jsonl", lambda record: int(record["step"]))


def test_only_what_is_new_is_read(tail: Tail[int]) -> None:
    assert not tail.poll()  # no file is no record
    tail.path.write_text("".join(map(line, range(20))))
    assert tail.poll()
    assert not tail.poll()
    with tail.path.open("r+b") as file:  # a second reading would find no JSON here
        file.write(b"x" * 20)
    with tail.path.open("a") as file:
        file.write(line(20) + '{"step"')
    assert tail.poll()
    assert tail.records == list(range(21))
    assert tail.problem is None
    with tail.path.open("a") as file:
        file.write(": 21}\n")
    assert tail.poll()
    assert tail.records[-1] == 21


@pytest.mark.parametrize("by", ["cut", "replaced", "written over"])
def test_another_file_is_read_again(tail: Tail[int], by: str) -> None:
    tail.path.write_text("".join(map(line, range(30))))
    tail.poll()
    if by == "cut":
        tail.path.write_text(line(0))
    elif by == "replaced":
        new = tail.path.with_name("new")
        new.write_text("".join(map(line, range(40, 100))))
        new.replace(tail.path)
    else:  # the same inode, and longer
        tail.path.write_text("".join(map(line, range(40, 100))))
    assert tail.poll()
    assert tail.records == ([0] if by == "cut" else list(range(40, 100)))
    tail.path.unlink()
    assert tail.poll()
    assert tail.records == []


def test_lines_that_are_no_records_are_left_out_and_named(tail: Tail[int]) -> None:
    wrong = ["nonsense\n", "[1]\n", '{"loss": 1}\n', '{"step": -1}\n', f'{{"step": {10**400}}}\n']
    tail.path.write_text(line(1) + "".join(wrong) + line(2))
    tail.poll()
    assert tail.records == [1, 2]
    assert tail.problem == (
        "metrics.jsonl must be lines of JSON with a step each, got others: lines 2, 3, 4, … left"
        " out"
    )
    tail.path.write_bytes(b"\xff\xfe\n" + line(3).encode())
    tail.poll()
    assert tail.records == [3]
    assert tail.problem is not None
    assert tail.problem.endswith("others: line 1 left out")


def test_a_file_that_cannot_be_read(tail: Tail[int]) -> None:
    tail.path.mkdir()
    assert tail.poll()
    assert tail.problem == "metrics.jsonl must be readable, got: Is a directory"
    assert not tail.poll()


def test_a_cached_file(tmp_path: Path) -> None:
    loaded = []

    def load(path: Path) -> str:
        loaded.append(path)
        text = path.read_text()
        if text == "bad":
            raise InputError("x", "be good", "bad")
        return text

    file = Cached(tmp_path / "x", load)
    assert not file.poll()
    file.path.write_text("one")
    assert (file.poll(), file.value) == (True, "one")
    assert not file.poll()
    assert len(loaded) == 1
    file.path.write_text("bad")
    assert file.poll()
    assert (file.value, file.problem) == (None, "`x` must be good, got bad")
    file.path.unlink()
    file.path.mkdir()
    assert file.poll()
    assert file.problem == "x must be readable, got: Is a directory"
