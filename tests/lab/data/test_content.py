"""Files are read as what they are, or refused: suffixes, marks, encodings, rows without text."""

from __future__ import annotations

import bz2
import codecs
import gzip
import io
import json
import lzma
import re
import tarfile
import zipfile
from pathlib import Path
from typing import Any

import pytest

from ddl.errors import InputError
from ddl.lab import data
from ddl.lab.cli.prepare import summary
from ddl.lab.data.content import HEAD, foreign, wide_encoding
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
LATIN, GREEK, HAN = "Grüße, liebe Leute\n" * 40, "αβγ δεζ ηθι\n" * 90, "中文 文字\n" * 300


def texts_of(out: Path) -> list[str]:
    return sorted(t.tobytes().decode() for part in read_documents(out).values() for t in part)


def as_tar(text: bytes) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as tar:
        member = tarfile.TarInfo("a.txt")
        member.size = len(text)
        tar.addfile(member, io.BytesIO(text))
    return out.getvalue()


def as_zip(text: bytes) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        archive.writestr("a.txt", text)
    return out.getvalue()


def parquet_of(column: Any) -> bytes:
    import pyarrow
    from pyarrow import parquet

    out = pyarrow.BufferOutputStream()
    parquet.write_table(pyarrow.table({"text": column}), out)
    return bytes(out.getvalue())


def arrow_of(texts: list[str]) -> bytes:
    import pyarrow

    table, out = pyarrow.table({"text": texts}), pyarrow.BufferOutputStream()
    with pyarrow.ipc.new_file(out, table.schema) as file:
        file.write(table)
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


SUFFIXES = ("zst", "xz", "lzma", "bz2", "lz4", "br", "sz", "Z", "zip", "7z", "ZST")


def test_an_unknown_compression_is_named(tmp_path: Path) -> None:
    """In a directory, too, where it would be left out in silence."""
    for number, suffix in enumerate(SUFFIXES):
        folder = tmp_path / str(number)
        folder.mkdir()
        file = folder / f"a.jsonl.{suffix}"
        as_lines(folder / "b.jsonl", TEXTS)
        as_lines(file, TEXTS)
        for inputs in (folder, file):
            with pytest.raises(InputError) as caught:
                prepare(configuration(inputs, tmp_path / "out"))
            expected = rf"`inputs` must be JSON lines .*, got {file}, which is compressed with \S+:"
            assert re.match(expected, str(caught.value))
    assert not (tmp_path / "out").exists()


def lies() -> dict[str, tuple[bytes, str]]:
    """Files whose suffix is another than their content's: name, content, what it is."""
    text, lines = "\n".join(TEXTS).encode(), b'{"text": "a"}\n'
    table = parquet_of(TEXTS)
    return {
        "a.txt": (gzip.compress(text), "compressed with gzip: give it the suffix .gz"),
        "b.jsonl": (gzip.compress(lines), "compressed with gzip: give it the suffix .gz"),
        "c.parquet": (gzip.compress(table), "compressed with gzip: decompress it"),
        "d.parquet.gz": (gzip.compress(table), "compressed with gzip: decompress it"),
        "e.jsonl": (table, "parquet: give it the suffix .parquet"),
        "f.txt.gz": (gzip.compress(table), "parquet: give it the suffix .parquet"),
        "g.jsonl.gz": (table, "parquet: decompress it"),
        "h.txt": (b"\x28\xb5\x2f\xfd" + text, "compressed with zstd: decompress it, or use gzip"),
        "i.parquet": (b"\x28\xb5\x2f\xfd", "compressed with zstd: decompress it, or use gzip"),
        "j.txt": (lzma.compress(text), "compressed with xz: decompress it, or use gzip"),
        "k.txt": (bz2.compress(text), "compressed with bzip2: decompress it, or use gzip"),
        "l.txt": (b"\x04\x22\x4d\x18" + text, "compressed with lz4: decompress it, or use gzip"),
        "m.txt": (as_zip(text), "compressed with zip: decompress it, or use gzip"),
        "n.txt": (as_tar(text), "a tar archive: unpack it"),
        "o.tar.gz": (gzip.compress(as_tar(text)), "a tar archive: unpack it"),
        "p.txt": (arrow_of(TEXTS), "an Arrow file: write it as parquet"),
    }


def test_a_suffix_that_lies_is_refused(tmp_path: Path) -> None:
    for name, (content, what) in lies().items():
        file = tmp_path / name
        file.write_bytes(content)
        with pytest.raises(InputError, match=f"got {re.escape(f'{file}, which is {what}')}"):
            prepare(configuration(file, tmp_path / "out"))
        if file.suffix == ".txt":  # `ddl train --data` reads it as bytes
            with pytest.raises(InputError, match=f"which is {re.escape(what.split(':')[0])}[;:]"):
                data.load(file)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "text", ["PAR1 is a mark.", "BZh is none.", "PK, 7z and ARROW1", "a\0b", "\0\0\0\0", "x\0"]
)
def test_a_text_that_begins_like_a_mark_is_text(text: str) -> None:
    assert foreign(Path("a.txt"), text.encode()) is None


# --- encodings ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text", ["short", LATIN, GREEK, HAN], ids=["short", "latin", "greek", "han"]
)
def test_wide_encodings_are_recognised(text: str) -> None:
    """With a mark and without, whatever the script; the same text in UTF-8 is none of them."""
    assert wide_encoding(text.encode()[:HEAD]) is None
    for width in ("16", "32"):
        for order in ("LE", "BE"):
            encoded = text.encode(f"utf-{width}{order}")
            mark = getattr(codecs, f"BOM_UTF{width}_{order}")
            assert wide_encoding(encoded[:HEAD]) == f"UTF-{width}{order}"
            assert wide_encoding((mark + encoded)[:HEAD]) == f"UTF-{width}"


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl", "a.txt.gz", "a.jsonl.gz"])
@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-32-be"])
def test_wide_encodings_are_refused(name: str, encoding: str, tmp_path: Path) -> None:
    file = tmp_path / name
    text = (LATIN if "txt" in name else '{"text": "abc"}\n').encode(encoding)
    file.write_bytes(gzip.compress(text) if name.endswith(".gz") else text)
    iconv = encoding.upper().replace("-LE", "LE").replace("-BE", "BE")
    sentence = f"got {file}, which is {iconv}: convert it to UTF-8, as with iconv -f {iconv} -t"
    with pytest.raises(InputError, match=re.escape(sentence)):
        prepare(configuration(file, tmp_path / "out"))
    if name == "a.txt":
        with pytest.raises(InputError, match=re.escape(f"got {file}, which is {iconv};")):
            data.load(file)


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
