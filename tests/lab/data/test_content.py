"""Files are read as what they are, or refused: suffixes, marks, encodings, rows without text."""

from __future__ import annotations

import bz2
import codecs
import gzip
import json
import lzma
import zipfile
from pathlib import Path
from typing import Any

import pytest

from ddl.errors import InputError
from ddl.lab import data
from ddl.lab.cli.prepare import summary
from ddl.lab.data import sources
from ddl.lab.data.prepare import prepare
from ddl.lab.data.shards import read_index
from tests.support.prepare_cases import (
    FORMATS,
    as_lines,
    configuration,
    contents,
    documents,
    read_documents,
)

TEXTS = documents(40)


def texts_of(out: Path) -> list[str]:
    return sorted(t.tobytes().decode() for part in read_documents(out).values() for t in part)


def parquet_of(column: Any) -> bytes:
    import pyarrow
    from pyarrow import parquet

    out = pyarrow.BufferOutputStream()
    parquet.write_table(pyarrow.table({"text": column}), out)
    return bytes(out.getvalue())


# --- suffixes -------------------------------------------------------------------------------------


@pytest.mark.parametrize("named", [False, True], ids=["in a directory", "by its name"])
def test_a_suffix_may_have_any_case(named: bool, tmp_path: Path) -> None:
    """In a directory, and for a file that is named itself."""
    for name, write in FORMATS.items():
        upper = name.upper().replace("JSON.", "JSONL.")
        folder = tmp_path / name
        folder.mkdir()
        write(folder / upper, TEXTS)
        prepare(configuration(folder / upper if named else folder, tmp_path / f"{name}-out"))
        assert texts_of(tmp_path / f"{name}-out") == sorted(TEXTS)


@pytest.mark.parametrize("suffix", ["gz", "bz2", "xz", "zip"])
@pytest.mark.parametrize("name", ["a.jsonl", "a.txt"])
def test_compressed_files(name: str, suffix: str, tmp_path: Path) -> None:
    FORMATS[name](tmp_path / name, TEXTS)
    content = (tmp_path / name).read_bytes()
    file = tmp_path / "in" / f"{name}.{suffix}"
    file.parent.mkdir()
    if suffix == "zip":
        with zipfile.ZipFile(file, "w") as archive:
            archive.writestr(name, content)
    else:
        pack = {"gz": gzip.compress, "bz2": bz2.compress, "xz": lzma.compress}[suffix]
        file.write_bytes(pack(content))
    for inputs in (file, file.parent):
        prepare(configuration(inputs, tmp_path / f"out-{inputs.name}"))
        assert texts_of(tmp_path / f"out-{inputs.name}") == sorted(TEXTS)
    whole = file.read_bytes()
    file.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(InputError, match=r"^`inputs` must be"):
        prepare(configuration(file, tmp_path / "cut"))
    assert not (tmp_path / "cut").exists()


def test_a_compression_without_its_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a directory, too, where it would be left out in silence."""
    monkeypatch.setattr(sources, "infer_compression", lambda name: None)
    as_lines(tmp_path / "b.jsonl", TEXTS)
    as_lines(tmp_path / "a.jsonl.zst", TEXTS)
    for inputs in (tmp_path, tmp_path / "a.jsonl.zst"):
        with pytest.raises(InputError, match=r"a\.jsonl\.zst, which needs the package zstandard$"):
            prepare(configuration(inputs, tmp_path / "out"))


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-32-be", "latin-1"])
def test_other_encodings_are_refused(encoding: str, tmp_path: Path) -> None:
    """Also those of which zeros make valid UTF-8."""
    file = tmp_path / "a.txt"
    file.write_bytes(
        ("Grüße\n" * 40 if encoding == "latin-1" else "plain text\n" * 40).encode(encoding)
    )
    for read in (lambda: prepare(configuration(file, tmp_path / "out")), lambda: data.load(file)):
        with pytest.raises(InputError, match=r"must be UTF-8 text, got .*a\.txt"):
            read()
    few = tmp_path / "b.txt"
    few.write_bytes(b"a text with one \0 is text\n" * 9)
    assert len(data.load(few).train)


@pytest.mark.parametrize("name", ["a.jsonl", "a.json.gz", "a.txt"])
@pytest.mark.parametrize("separated", [True, False])
def test_a_byte_order_mark_is_no_text(name: str, separated: bool, tmp_path: Path) -> None:
    FORMATS[name](tmp_path / name, TEXTS)
    content = (tmp_path / name).read_bytes()
    marked = tmp_path / "marked" / name
    marked.parent.mkdir()
    if name.endswith(".gz"):
        marked.write_bytes(gzip.compress(codecs.BOM_UTF8 + gzip.decompress(content)))
    else:
        marked.write_bytes(codecs.BOM_UTF8 + content)
    options: dict[str, Any] = {} if separated else {"separator": None, "validation": 0.5}
    more = [tmp_path / f"more-{i}" for i in range(9)]  # texts, some of which are held out
    for path in more:
        path.write_text(path.name)
    for file, out in ((tmp_path / name, "out"), (marked, "marked-out")):
        prepare(configuration((file, *more), tmp_path / out, **options))
    plain, found = (
        {name: content for name, content in contents(tmp_path / out).items() if "-" in name}
        for out in ("out", "marked-out")
    )
    assert plain == found


def test_empty_files_have_no_documents(tmp_path: Path) -> None:
    for name in ("a.txt", "a.jsonl", "a.jsonl.gz", "a.txt.gz"):
        (tmp_path / name).touch()
    (tmp_path / "b.txt.gz").write_bytes(gzip.compress(b""))
    with pytest.raises(InputError, match=r"^`inputs` must have at least one document that is not"):
        prepare(configuration(tmp_path, tmp_path / "out"))
    as_lines(tmp_path / "c.jsonl", TEXTS)
    prepare(configuration(tmp_path, tmp_path / "out"))
    assert texts_of(tmp_path / "out") == sorted(TEXTS)


# --- rows -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["string", "large_string", "string_view", "dictionary"])
@pytest.mark.parametrize("workers", [1, pytest.param(2, marks=pytest.mark.exhaustive)])
def test_columns_of_every_kind_of_string(kind: str, workers: int, tmp_path: Path) -> None:
    """Null rows are left out, and counted."""
    import pyarrow

    column = pyarrow.array([None, *TEXTS, None, "", *TEXTS[:3]])
    if kind == "dictionary":
        column = column.dictionary_encode()
    else:
        column = column.cast(getattr(pyarrow, kind)())
    (tmp_path / "a.parquet").write_bytes(parquet_of(column))
    (tmp_path / "b.parquet").write_bytes(parquet_of(pyarrow.nulls(4)))
    config = configuration(tmp_path, tmp_path / "out", workers=workers)
    done = prepare(config)
    assert texts_of(tmp_path / "out") == sorted(TEXTS + TEXTS[:3])
    assert done.index.without_text == 7
    assert summary(config, done).endswith("for validation, and left out 7 rows without text")
    again = prepare(config)
    assert again.was_complete
    assert summary(config, again).endswith("left out 7 rows without text")


def test_lines_without_a_text(tmp_path: Path) -> None:
    """Null and empty texts are counted; blank lines and line ends of Windows are nothing."""
    lines = [json.dumps({"text": text}) for text in TEXTS]
    lines[3:3] = ['{"text": null}', "", '{"text": ""}', "  "]
    (tmp_path / "a.jsonl").write_bytes(codecs.BOM_UTF8 + "\r\n".join([*lines, "", "", ""]).encode())
    config = configuration(tmp_path / "a.jsonl", tmp_path / "out")
    assert prepare(config).index.without_text == 2
    assert texts_of(tmp_path / "out") == sorted(TEXTS)


def test_the_count_goes_on_with_the_preparation(tmp_path: Path, small_units: None) -> None:
    lines = [json.dumps({"text": text}) + '\n{"text": null}' for text in documents(200)]
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    config = configuration(tmp_path / "a.jsonl", tmp_path / "out", shard_tokens=5000)

    def stop(progress: object) -> None:
        if (tmp_path / "out" / "train-00001.bin").exists():
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prepare(config, stop)
    assert 0 < read_index(tmp_path / "out").without_text < 200
    assert prepare(config).index.without_text == 200
    prepare(configuration(tmp_path / "a.jsonl", tmp_path / "whole", shard_tokens=5000))
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")
