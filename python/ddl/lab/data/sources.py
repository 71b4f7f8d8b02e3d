"""Sources of `ddl prepare`: text, JSON lines and parquet files, read in bounded memory.

One process reads the files and cuts them into units of about a MiB of text (units.py); others turn
a unit into documents (documents.py) and encode them. Where a file is cut depends on its content
alone, so the documents and their pieces are the same whatever the number of processes.
"""

from __future__ import annotations

import lzma
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

from fsspec.utils import infer_compression

from ddl.errors import InputError, reason_of

UNIT = 2**20
BROKEN = (zlib.error, lzma.LZMAError, zipfile.BadZipFile)  # errors of decompression
# Suffixes of compressions that fsspec reads if a package is there.
NEEDED = {".zst": "zstandard", ".lz4": "lz4", ".snappy": "python-snappy"}

Format = Literal["text", "lines", "parquet"]
FORMATS: dict[str, Format] = {
    ".txt": "text",
    ".jsonl": "lines",
    ".ndjson": "lines",
    ".json": "lines",
    ".parquet": "parquet",
}


@dataclass(frozen=True)
class Reading:
    """How documents are found in files, and which of them are held out.

    field: the field of a JSON line, or the column of a parquet file, with the text. separator:
    comes between the documents of a text file; None if each file is one. share: of the documents
    that are held out for validation. unit: bytes of text that are read and encoded at once; a
    longer document is cut into pieces.
    """

    field: str
    separator: bytes | None
    share: float
    unit: int = UNIT


class Source(NamedTuple):
    """An input file. compression: by the name that fsspec has for it; None for none."""

    path: Path
    format: Format
    compression: str | None


class Unit(NamedTuple):
    """Some documents of a source, or one piece of a long text.

    items: lines, texts or one piece, as bytes; None for a null row. first: the number of the first
    item: a line or a row, from 1, or a byte of a text file, from 0. read: bytes of the file read so
    far. continues: the piece goes on with the document of the unit before. held_out: whether that
    document is; None if each document decides for itself. place: (number of the source, number of
    the unit in it, from 1).
    """

    source: Source
    first: int
    items: Sequence[bytes | None]
    read: int
    continues: bool = False
    held_out: bool | None = None
    place: tuple[int, int] = (0, 0)


def find(inputs: Sequence[Path]) -> list[Source]:
    """The files at `inputs` in that order, those of a directory in the order of their paths.

    In a directory, files of unknown suffix are left out, and .json, which seldom has a document in
    each line. A file that is itself in `inputs` is read as text if its suffix is unknown, and as
    JSON lines if it is .json. Suffixes are compared without case. Raises InputError if there is no
    file, or one has a compression whose package is missing.
    """
    found: list[Path] = []
    for path in inputs:
        if not path.is_dir():
            found.append(path)
            continue
        with reading(path):
            named = (p for p in path.rglob("*") if _format(p) and p.suffix.lower() != ".json")
            inside = sorted(p for p in named if not p.is_dir())  # Spark names directories .parquet
        if not inside:
            raise InputError(
                "inputs",
                (
                    "be files of text, JSON lines or parquet, or directories with .txt, .jsonl,"
                    " .ndjson or .parquet"
                ),
                f"{path} without any",
            )
        found += inside
    return [Source(path, _format(path) or "text", _compression(path)) for path in found]


def _format(path: Path) -> Format | None:
    if _compression(path) is None:
        return FORMATS.get(path.suffix.lower())
    inner = FORMATS.get(path.with_suffix("").suffix.lower())
    return None if inner == "parquet" else inner


def _compression(path: Path) -> str | None:
    kind: str | None = infer_compression(path.name)
    needed = NEEDED.get(path.suffix.lower())
    if kind is None and needed is not None:
        expected = "be files whose compression can be read"
        raise InputError("inputs", expected, f"{path}, which needs the package {needed}")
    return kind


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Turn an error of reading `path` into an InputError that names it."""
    try:
        yield
    except (OSError, EOFError, *BROKEN) as error:
        raise InputError("inputs", "be readable files", f"{path}: {reason_of(error)}") from error


def damaged(source: Source, problem: str, others: tuple[str, ...] = ()) -> InputError:
    """The error for a source whose content cannot be used; others: arguments in the problem."""
    got = f"{source.path}, whose {problem}"
    return InputError("inputs", f"be {_expected(source)}", got, others)


def _expected(source: Source) -> str:
    return {
        "text": "UTF-8 text",
        "lines": "JSON lines with a text each",
        "parquet": "parquet with a text in each row",
    }[source.format]
