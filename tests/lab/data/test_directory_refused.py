"""`ddl prepare` leaves another's directory alone, and goes on only with what began its own."""

from __future__ import annotations

import fcntl
import os
import re
from pathlib import Path

import pytest

from ddl.errors import InputError
from ddl.lab.data.prepare import prepare
from tests.support.prepare_cases import (
    as_lines,
    configuration,
    contents,
    documents,
    refused,
    write_tokenizer,
)

TEMPORARY = ".index.json.0123abcd.tmp"


@pytest.mark.parametrize("name", ["notes.txt", "train-00000.bin", "tokenizer.json"])
def test_other_files_are_left_alone(name: str, lines: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / name).write_text("mine")
    sentence = (
        f"`out` must be new, empty or a directory that `ddl prepare` began, got {out}, which has"
        f" {name}"
    )
    refused(sentence, configuration(lines, out))
    assert contents(out) == {name: b"mine"}
    refused(f"`out` must be a directory, got {lines}: Not a directory", configuration(lines, lines))


@pytest.mark.parametrize(
    "name", ["index.json", "tokenizer.json", "train-00000.bin", "train-00009.bin", TEMPORARY]
)
def test_a_directory_in_a_files_place_is_left_alone(name: str, lines: Path, tmp_path: Path) -> None:
    config = configuration(lines, tmp_path / "out")
    prepare(config)
    place = tmp_path / "out" / name
    place.unlink(missing_ok=True)
    place.mkdir()
    (place / "notes.txt").write_text("mine")
    sentence = (
        "`out` must be new, empty or a directory that `ddl prepare` began, got"
        f" {tmp_path / 'out'}, which has the directory {name}"
    )
    refused(sentence, config)
    assert contents(place) == {"notes.txt": b"mine"}


def test_an_index_of_something_else_is_refused(lines: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "index.json").write_text("{}")
    sentence = (
        f"`out` must be a directory of `ddl prepare`, got {out / 'index.json'}, which is no such"
        " index: 'format'"
    )
    refused(sentence, configuration(lines, out))


def test_a_file_beside_the_shards_is_refused(lines: Path, tmp_path: Path) -> None:
    config = configuration(lines, tmp_path / "out")
    prepare(config)
    (tmp_path / "out" / "notes.txt").write_text("mine")
    sentence = (
        "`out` must be new, empty or a directory that `ddl prepare` began, got"
        f" {tmp_path / 'out'}, which has notes.txt"
    )
    refused(sentence, config)


def test_going_on_with_other_options_is_refused(
    lines: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    prepare(configuration(lines, out))
    same = "`out` must be new or a directory that was begun with the same"
    options = {
        "text_field": ("text", "body"),
        "validation": (0.2, 0.3),
        "shard_tokens": (100_000_000, 5),
    }
    for name, (old, new) in options.items():
        sentence = f"{same} options, got {out}, begun with {name} = {old!r} instead of {new!r}"
        refused(sentence, configuration(lines, out, **{name: new}))
    with monkeypatch.context() as patch:
        patch.setattr("ddl.lab.data.directory.__version__", "9.9")
        sentence = f"{same} versions, got {out}, begun with ddl = '0.1.0' instead of '9.9'"
        refused(sentence, configuration(lines, out))
    file = write_tokenizer(tmp_path / "tokenizer.json")
    with pytest.raises(
        InputError, match=f"^{re.escape(same)} options, got .* begun with tokenizer"
    ):
        prepare(configuration(lines, out, tokenizer=str(file)))


def test_going_on_with_other_sources_is_refused(lines: Path, tmp_path: Path) -> None:
    out, more = tmp_path / "out", tmp_path / "b.jsonl"
    as_lines(more, documents(5))
    prepare(configuration((lines, more), out))
    files = f"`inputs` must be the files with which {out} was begun, in their order, got"
    for inputs in ((more, lines), (lines,)):
        refused(f"{files} others", configuration(inputs, out))
    as_lines(more, documents(6))
    sentence = f"{files} b.jsonl, which is another one or has changed"
    refused(sentence, configuration((lines, more), out))


def test_shards_that_were_changed_are_refused(lines: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    config = configuration(lines, out)
    prepare(config)
    for name in ("train-00000.bin", "validation-00000.starts"):
        content = (out / name).read_bytes()
        for damaged in (content[:-1], bytes(len(content)), None):
            (out / name).write_bytes(damaged) if damaged is not None else (out / name).unlink()
            sentence = (
                f"`out` must have the shards of its index.json, got {out}, whose {name} is missing"
                " or was changed: remove the directory"
            )
            refused(sentence, config)
        (out / name).write_bytes(content)
    assert prepare(config).was_complete


def test_a_directory_that_another_process_writes_is_refused(lines: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    descriptor = os.open(out, os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    sentence = (
        f"`out` must be a directory of this process alone, got {out}, into which another one is"
        " writing"
    )
    refused(sentence, configuration(lines, out))
    os.close(descriptor)
    prepare(configuration(lines, out))


def test_a_directory_that_cannot_be_written_is_refused(lines: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    out = tmp_path / "file" / "out"
    refused(f"`out` must be a directory, got {out}: Not a directory", configuration(lines, out))
