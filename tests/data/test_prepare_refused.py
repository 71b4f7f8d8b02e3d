"""`ddl prepare` refuses in a sentence what it cannot use, and leaves other files alone."""

from __future__ import annotations

import fcntl
import gzip
import json
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from ddl.config import PrepareConfig
from ddl.data import sources
from ddl.data.prepare import Progress, prepare
from ddl.errors import InputError
from tests.support.prepare_cases import (
    as_gzip,
    as_lines,
    as_parquet,
    configuration,
    contents,
    documents,
    write_tokenizer,
)

TEXTS = documents(200)


def refused(sentence: str, config: PrepareConfig, *more: Callable[[Progress], object]) -> None:
    with pytest.raises(InputError, match=f"^{re.escape(sentence)}$"):
        prepare(config, *more)


@pytest.fixture
def lines(tmp_path: Path) -> Path:
    as_lines(tmp_path / "a.jsonl", TEXTS)
    return tmp_path / "a.jsonl"


# --- inputs ---------------------------------------------------------------------------------------

GOOD = b'{"text": "good"}\n'
NO_JSON = "line 2 is no JSON: "  # Python's reason follows, which depends on its version
BAD = {
    b"{": NO_JSON,
    b"[" * 100_000: NO_JSON,
    b'{"text": "\xff"}': NO_JSON,
    b"[1]": "line 2 has no text in `text_field` = 'text'",
    b'{"txt": "a"}': "line 2 has no text in `text_field` = 'text'",
    b'{"text": null}': "line 2 has no text in `text_field` = 'text'",
    b'{"text": "\\ud83d"}': "line 2 has half of a surrogate pair",
}


@pytest.mark.parametrize(
    ("line", "problem", "workers"),
    [(b"[1]", BAD[b"[1]"], 2), *((line, problem, 1) for line, problem in BAD.items())],
    ids=range(len(BAD) + 1),
)
def test_a_line(line: bytes, problem: str, workers: int, tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    file.write_bytes(GOOD + line + b"\n" + GOOD)
    sentence = f"`inputs` must be JSON lines with a text each, got {file}, whose {problem}"
    end = "" if problem == NO_JSON else "$"
    with pytest.raises(InputError, match=f"^{re.escape(sentence)}{end}"):
        prepare(configuration(file, tmp_path / "out", workers=workers))


@pytest.mark.parametrize("unit", [7, 64, 2**20])
@pytest.mark.parametrize("separator", [None, "\n\n"])
def test_a_text_that_is_not_utf8(
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


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
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


def test_a_damaged_gzip(tmp_path: Path) -> None:
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


def test_parquet(tmp_path: Path) -> None:
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
    parquet.write_table(pyarrow.table({"text": ["a", "b", None, "c"]}), file)
    refused(f"{prefix} 3 is null", configuration(file, out))
    wrong = pyarrow.StringArray.from_buffers(
        2, pyarrow.array([0, 1, 2], pyarrow.int32()).buffers()[1], pyarrow.py_buffer(b"a\xff")
    )
    parquet.write_table(pyarrow.table({"text": wrong}), file)
    refused(f"{prefix} 2 is not UTF-8", configuration(file, out))


def test_nothing_to_train_or_to_validate_on(tmp_path: Path) -> None:
    """Then nothing is left behind, so that the next try is not refused for it."""
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
        assert contents(out) == {}
    (tmp_path / "a.txt").write_text("one document")
    sentence = (
        "`validation` must hold out a document, got 0.001, which holds out none of 1; without"
        " `separator` a text file is one document"
    )
    refused(sentence, configuration(tmp_path / "a.txt", out, validation=0.001, separator=None))


def test_an_input_that_changes_meanwhile(lines: Path, tmp_path: Path) -> None:
    sentence = f"`inputs` must stay as they are, got {lines}, which changed while it was read"
    refused(
        sentence, configuration(lines, tmp_path / "out"), lambda progress: os.utime(lines, (1, 1))
    )
    assert contents(tmp_path / "out") == {}


# --- options --------------------------------------------------------------------------------------


def test_tokenizers(lines: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_a_text_that_the_vocabulary_cannot_spell(lines: Path, tmp_path: Path) -> None:
    file = write_tokenizer(tmp_path / "tokenizer.json")
    values = json.loads(file.read_text("utf-8"))
    values["model"] = {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "?"}
    file.write_text(json.dumps(values), encoding="utf-8")
    sentence = "`tokenizer` must encode every text, got WordLevel error: Missing [UNK] token from"
    with pytest.raises(InputError, match=f"^{re.escape(sentence)}"):
        prepare(configuration(lines, tmp_path / "out", tokenizer=str(file)))


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"out": None}, "`out` must be the directory to write, got None"),
        ({"tokenizer": None}, "`tokenizer` must be bytes, gpt2 or a tokenizer.json, got None"),
        ({"separator": ""}, "`separator` must be at least one character, got ''"),
        ({"validation": 0}, "`validation` must be above 0 and at most 1, got 0"),
        ({"shard_tokens": 0}, "`shard_tokens` must be an integer of at least 1, got 0"),
        ({"workers": 0}, "`workers` must be an integer of at least 1, got 0"),
        ({"inputs": ()}, "`inputs` must be at least one file, got None"),
    ],
)
def test_options(options: dict[str, object], sentence: str) -> None:
    with pytest.raises(InputError, match=f"^{re.escape(sentence)}$"):
        PrepareConfig(**{"inputs": (Path("a"),), "out": Path("b"), "tokenizer": "bytes"} | options)  # type: ignore[arg-type]


# --- the directory --------------------------------------------------------------------------------


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


def test_an_index_of_something_else(lines: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "index.json").write_text("{}")
    sentence = (
        f"`out` must be a directory of `ddl prepare`, got {out / 'index.json'}, which is no such"
        " index: 'format'"
    )
    refused(sentence, configuration(lines, out))


def test_a_file_beside_the_shards_is_left_alone(lines: Path, tmp_path: Path) -> None:
    config = configuration(lines, tmp_path / "out")
    prepare(config)
    (tmp_path / "out" / "notes.txt").write_text("mine")
    sentence = (
        "`out` must be new, empty or a directory that `ddl prepare` began, got"
        f" {tmp_path / 'out'}, which has notes.txt"
    )
    refused(sentence, config)


def test_going_on_with_something_else(
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
        patch.setattr("ddl.data.directory.__version__", "9.9")
        sentence = f"{same} versions, got {out}, begun with ddl = '0.1.0' instead of '9.9'"
        refused(sentence, configuration(lines, out))
    file = write_tokenizer(tmp_path / "tokenizer.json")
    with pytest.raises(
        InputError, match=f"^{re.escape(same)} options, got .* begun with tokenizer"
    ):
        prepare(configuration(lines, out, tokenizer=str(file)))


def test_going_on_with_other_sources(lines: Path, tmp_path: Path) -> None:
    out, more = tmp_path / "out", tmp_path / "b.jsonl"
    as_lines(more, TEXTS[:5])
    prepare(configuration((lines, more), out))
    files = f"`inputs` must be the files with which {out} was begun, in their order, got"
    for inputs in ((more, lines), (lines,)):
        refused(f"{files} others", configuration(inputs, out))
    as_lines(more, TEXTS[:6])
    sentence = f"{files} b.jsonl, which is another one or has changed"
    refused(sentence, configuration((lines, more), out))


def test_shards_that_were_changed(lines: Path, tmp_path: Path) -> None:
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
    assert prepare(config).again


def test_two_at_once(lines: Path, tmp_path: Path) -> None:
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


def test_a_directory_that_cannot_be_written(lines: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    out = tmp_path / "file" / "out"
    refused(f"`out` must be a directory, got {out}: Not a directory", configuration(lines, out))
