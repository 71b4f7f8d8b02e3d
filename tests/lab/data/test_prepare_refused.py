"""`ddl prepare` refuses inputs and options that it cannot use, in a sentence."""

from __future__ import annotations

import errno
import gzip
import json
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ddl.errors import InputError
from ddl.lab.config import PrepareConfig
from ddl.lab.data import sources
from ddl.lab.data.directory import begin
from ddl.lab.data.prepare import prepare
from tests.support.prepare_cases import (
    FORMATS,
    as_gzip,
    as_lines,
    as_parquet,
    configuration,
    contents,
    documents,
    refused,
    write_tokenizer,
)

TEXTS = documents(200)


# --- inputs ---------------------------------------------------------------------------------------

GOOD = b'{"text": "good"}\n'
NO_JSON = "line 2 is no JSON: "  # Python's reason follows, which depends on its version
BAD = {
    b"{": NO_JSON,
    b"[" * 100_000: NO_JSON,
    b'{"text": "\xff"}': NO_JSON,
    b"[1]": "line 2 has no text in `text_field` = 'text'",
    b'{"txt": "a"}': "line 2 has no text in `text_field` = 'text'",
    b'{"text": 3}': "line 2 has no text in `text_field` = 'text'",
    b'{"text": "\\ud83d"}': "line 2 has half of a surrogate pair",
}


@pytest.mark.parametrize(
    ("line", "problem", "workers"),
    [(b"[1]", BAD[b"[1]"], 2), *((line, problem, 1) for line, problem in BAD.items())],
    ids=range(len(BAD) + 1),
)
def test_a_line_without_a_text_is_refused(
    line: bytes, problem: str, workers: int, tmp_path: Path
) -> None:
    file = tmp_path / "a.jsonl"
    file.write_bytes(GOOD + line + b"\n" + GOOD)
    sentence = f"`inputs` must be JSON lines with a text each, got {file}, whose {problem}"
    end = "" if problem == NO_JSON else "$"
    with pytest.raises(InputError, match=f"^{re.escape(sentence)}{end}"):
        prepare(configuration(file, tmp_path / "out", workers=workers))


@pytest.mark.parametrize("unit", [7, 64, 2**20])
@pytest.mark.parametrize("separator", [None, "\n\n"])
def test_a_text_that_is_not_utf8_is_refused(
    unit: int, separator: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sources, "UNIT", unit)
    file = tmp_path / "a.txt"
    good = "aß犰\n\n".encode() * 9
    for spoiled, byte, at, reason in (
        (good + b"\xff" + good, "0xff", len(good), "invalid start byte"),
        (good + b"\xe7\x8b", "0xe7", len(good), "unexpected end of data"),
    ):
        file.write_bytes(spoiled)
        sentence = f"`inputs` must be UTF-8 text, got {file}, whose byte {at} is {byte} ({reason})"
        refused(sentence, configuration(file, tmp_path / "out", separator=separator))


def test_files_that_cannot_be_read_are_refused(tmp_path: Path) -> None:
    missing, empty = tmp_path / "missing.txt", tmp_path / "empty"
    empty.mkdir()
    for name in ("notes.zip", "index.json"):
        (empty / name).touch()
    cases = {
        missing: f"`inputs` must be readable files, got {missing}: No such file or directory",
        empty: "`inputs` must be files of text, JSON lines or parquet, or directories with .txt,"
        f" .jsonl, .ndjson or .parquet, got {empty} without any",
    }
    for path, sentence in cases.items():
        refused(sentence, configuration(path, tmp_path / "out"))
    assert not (tmp_path / "out").exists()


def test_a_damaged_gzip_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl.gz"
    as_gzip(file, TEXTS)
    whole = file.read_bytes()
    cases = {
        whole[:-20]: "Compressed file ended before the end-of-stream marker was reached",
        b"no gzip at all": "Not a gzipped file (b'no')",
        whole[:200] + bytes(50) + whole[250:]: None,
        gzip.compress(b"{}")[:-8] + bytes(8): None,
    }
    for content, reason in cases.items():
        file.write_bytes(content)
        sentence = f"`inputs` must be readable files, got {file}: "
        with pytest.raises(InputError, match=f"^{re.escape(sentence + (reason or ''))}"):
            prepare(configuration(file, tmp_path / "out"))


def test_damaged_parquet_and_columns_without_text_are_refused(tmp_path: Path) -> None:
    import pyarrow
    from pyarrow import parquet

    file, out = tmp_path / "a.parquet", tmp_path / "out"
    as_parquet(file, TEXTS)
    whole = file.read_bytes()
    for damaged in (whole[:-100], b"", b"PAR1", whole[:300] + bytes(900) + whole[1200:]):
        file.write_bytes(damaged)
        expected = f"`inputs` must be readable parquet, got {file}: "
        with pytest.raises(InputError, match=f"^{re.escape(expected)}"):
            prepare(configuration(file, out))
    as_parquet(file, TEXTS)
    fields = {
        "body": f"`text_field` must be a column of {file}, one of id, text, got 'body'",
        "id": f"`text_field` must be a column of strings, got 'id' of {file} with int64",
    }
    for field, sentence in fields.items():
        refused(sentence, configuration(file, out, text_field=field))
    prefix = f"`inputs` must be parquet with a text in each row, got {file}, whose row"
    parquet.write_table(pyarrow.table({"text": [["a"], ["b"]]}), file)
    got = f"got 'text' of {file} with list<element: string>"
    refused(f"`text_field` must be a column of strings, {got}", configuration(file, out))
    wrong = pyarrow.StringArray.from_buffers(
        2, pyarrow.array([0, 1, 2], pyarrow.int32()).buffers()[1], pyarrow.py_buffer(b"a\xff")
    )
    parquet.write_table(pyarrow.table({"text": wrong}), file)
    refused(f"{prefix} 2 is not UTF-8", configuration(file, out))


def test_nothing_to_train_or_to_validate_on_is_refused(tmp_path: Path) -> None:
    """Then nothing is left behind."""
    file, out = tmp_path / "a.jsonl", tmp_path / "out"
    cases: list[tuple[list[str], float, str]] = [
        ([], 0.5, "`inputs` must have at least one document that is not empty, got none"),
        (["", ""], 0.5, "`inputs` must have at least one document that is not empty, got none"),
        (
            TEXTS[:3],
            0.999,
            "`validation` must leave a document, got 0.999, which holds out all of 3",
        ),
        (
            TEXTS[:3],
            0.001,
            "`validation` must hold out a document, got 0.001, which holds out none of 3",
        ),
    ]
    for texts, share, sentence in cases:
        as_lines(file, texts)
        refused(sentence, configuration(file, out, validation=share))
        assert not out.exists()
    (tmp_path / "a.txt").write_text("one document")
    sentence = (
        "`validation` must hold out a document, got 0.001, which holds out none of 1: without"
        " `separator` a text file is one document, and with '\\n\\n' documents end at empty lines"
    )
    refused(sentence, configuration(tmp_path / "a.txt", out, validation=0.001, separator=None))


def vanishes(path: Path) -> None:
    path.unlink(missing_ok=True)


def is_cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def grows(path: Path) -> None:
    path.open("ab").write(b"more")


def is_joined(path: Path) -> None:
    path.with_name(path.name.replace("b", "z", 1)).write_bytes(path.read_bytes())


HAPPENS = (vanishes, is_cut, grows, is_joined)


@pytest.mark.table
@pytest.mark.parametrize("happens", HAPPENS)
@pytest.mark.parametrize("name", ["a.jsonl", "a.json.gz", "a.txt", "a.parquet"])
@pytest.mark.parametrize("workers", [1, pytest.param(2, marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize("early", [False, True], ids=["while it is read", "before"])
def test_an_input_that_changes_meanwhile_is_refused(
    happens: Callable[[Path], None],
    name: str,
    workers: int,
    early: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whatever happens to the last file of a directory: a sentence, and nothing is left."""
    monkeypatch.setattr(sources, "UNIT", 4096)
    folder, out = tmp_path / "in", tmp_path / "there" / "out"
    folder.mkdir()
    for first in ("a", "b"):
        FORMATS[name](folder / name.replace("a", first, 1), TEXTS)
    victim = folder / name.replace("a", "b", 1)

    def act(*_: object) -> None:
        if not (folder / "done").exists():
            (folder / "done").touch()
            happens(victim)

    if early:
        monkeypatch.setattr("ddl.lab.data.prepare.begin", lambda *given: [begin(*given), act()][0])
    config = configuration(folder, out, workers=workers, shard_tokens=3000)
    gone = f"`inputs` must be readable files, got {victim}: No such file or directory"
    with pytest.raises(InputError) as caught:
        prepare(config, *([] if early else [act]))
    changed = f"`inputs` must stay as they are, got {victim}, which changed while it was read"
    other = victim.with_name(victim.name.replace("b", "z", 1))
    expected = {
        vanishes: gone,
        is_joined: f"`inputs` must stay as they are, got {other}, which appeared while they were"
        " read",
    }
    assert str(caught.value) == expected.get(happens, changed)
    assert not (tmp_path / "there").exists()


def test_a_disk_that_fails_loses_nothing(
    lines: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Shards that are complete stay if the machine has failed: the same call goes on."""
    monkeypatch.setattr(sources, "UNIT", 4096)
    config = configuration(lines, tmp_path / "out", shard_tokens=3000)
    opened = Path.open

    def fails(path: Path, *given: Any, **options: Any) -> Any:
        if path.name.startswith(".train-00002"):
            raise OSError(errno.ENOSPC, "No space left on device")
        return opened(path, *given, **options)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "open", fails)
        with pytest.raises(InputError, match=r"^`out` must be writable, .* No space left"):
            prepare(config)
    assert (tmp_path / "out" / "train-00001.bin").exists()
    prepare(config)
    prepare(configuration(lines, tmp_path / "again", shard_tokens=3000))
    assert contents(tmp_path / "out") == contents(tmp_path / "again")


# --- options --------------------------------------------------------------------------------------


def test_tokenizers_that_cannot_be_had_are_refused(
    lines: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "tiktoken", None)
    missing, damaged, out = tmp_path / "missing.json", tmp_path / "damaged.json", tmp_path / "out"
    damaged.write_text("{}")
    named = "`tokenizer` must be a tokenizer.json that the package tokenizers reads, got KeyError:"
    cases = {
        "gpt2": "GPT-2 tokens need the package tiktoken to be read as text: pip install tiktoken;"
        " GPT-2's tokenizer.json as `tokenizer` needs neither tiktoken nor network",
        str(missing): f"`tokenizer` must be bytes, gpt2 or a tokenizer.json, got {missing}: No such"
        " file or directory",
        str(damaged): f"{named} 'model'",
    }
    for name, sentence in cases.items():
        refused(sentence, configuration(lines, out, tokenizer=name))
    file = write_tokenizer(tmp_path / "tokenizer.json", end=None)
    for name in ("bytes", str(file)):
        sentence = f"`document_token` must be auto, none or a token of {name}, got '<s>'"
        refused(sentence, configuration(lines, out, tokenizer=name, document_token="<s>"))


def test_a_text_that_the_vocabulary_cannot_spell_is_refused(lines: Path, tmp_path: Path) -> None:
    file = write_tokenizer(tmp_path / "tokenizer.json")
    values = json.loads(file.read_text("utf-8"))
    values["model"] = {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "?"}
    file.write_text(json.dumps(values), encoding="utf-8")
    sentence = "`tokenizer` must encode every text, got WordLevel error: Missing [UNK] token from"
    with pytest.raises(InputError, match=f"^{re.escape(sentence)}"):
        prepare(configuration(lines, tmp_path / "out", tokenizer=str(file)))


def test_a_separator_that_is_not_utf8_is_refused(lines: Path, tmp_path: Path) -> None:
    """The shell passes any bytes."""
    sentence = "`separator` must be UTF-8 text, got '\\udcff'"
    refused(sentence, configuration(lines, tmp_path / "out", separator=os.fsdecode(b"\xff")))


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (
            {"out": None},
            "`out` must name the directory to write, as in `--out data/notes`, got nothing",
        ),
        (
            {"tokenizer": None},
            "`tokenizer` must name bytes, gpt2 or a tokenizer.json, as in `--tokenizer bytes`, got"
            " nothing",
        ),
        ({"separator": ""}, "`separator` must be at least one character, got ''"),
        ({"validation": 0}, "`validation` must be above 0 and at most 1, got 0"),
        ({"shard_tokens": 0}, "`shard_tokens` must be an integer of at least 1, got 0"),
        ({"workers": 0}, "`workers` must be an integer of at least 1, got 0"),
        ({"inputs": ()}, "`inputs` must name at least one file or directory, got nothing"),
    ],
)
def test_options_out_of_range_are_refused(options: dict[str, object], sentence: str) -> None:
    with pytest.raises(InputError, match=f"^{re.escape(sentence)}$"):
        PrepareConfig(**{"inputs": (Path("a"),), "out": Path("b"), "tokenizer": "bytes"} | options)  # type: ignore[arg-type]
