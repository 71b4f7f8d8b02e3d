"""Sources of `ddl prepare`: text, JSON lines and parquet files, read in bounded memory.

One process reads the files and cuts them into units of about a MiB of text; others turn a unit into
documents and encode them. Where a file is cut depends on its content alone, so the documents and
their pieces are the same whatever the number of processes.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Literal, NamedTuple

from ddl.errors import InputError, first_line

UNIT = 2**20
BATCH = 64  # rows of a parquet file that are in memory at once
HELD_OUT_BITS = 64

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
    """An input file."""

    path: Path
    format: Format
    compressed: bool


class Unit(NamedTuple):
    """Some documents of a source, or one piece of a long text.

    items: lines, texts or one piece, as bytes. first: the number of the first item: a line or a
    row, from 1, or a byte of a text file, from 0. read: bytes of the file read so far. continues:
    the piece goes on with the document of the unit before. held_out: whether that document is;
    None if each document decides for itself. place: (number of the source, number of the unit in
    it, from 1).
    """

    source: Source
    first: int
    items: list[bytes]
    read: int
    continues: bool = False
    held_out: bool | None = None
    place: tuple[int, int] = (0, 0)


class Piece(NamedTuple):
    """UTF-8 text that is encoded by itself: a document, or a part of a long one."""

    text: bytes
    begins: bool
    held_out: bool


def find(inputs: Sequence[Path]) -> list[Source]:
    """The files at `inputs` in that order, a directory's in the order of their paths.

    In a directory, files of unknown suffix are left out, and .json, which seldom holds lines. If
    they are named themselves, they are a text and lines. Raises InputError if there is none, or
    one cannot be read.
    """
    found: list[Path] = []
    for path in inputs:
        if not path.is_dir():
            found.append(path)
            continue
        named = (p for p in path.rglob("*") if _format(p) and p.suffix != ".json")
        inside = sorted(p for p in named if not p.is_dir())  # Spark names directories .parquet
        if not inside:
            raise InputError(
                "`inputs` must be files of text, JSON lines or parquet, or directories with .txt,"
                f" .jsonl, .ndjson or .parquet, got {path} without any"
            )
        found += inside
    for path in found:
        with reading(path):
            path.open("rb").close()
    return [Source(path, _format(path) or "text", path.suffix == ".gz") for path in found]


def _format(path: Path) -> Format | None:
    suffix = path.with_suffix("").suffix if path.suffix == ".gz" else path.suffix
    return FORMATS.get(suffix)


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Turn an error of reading `path` into an InputError that names it."""
    try:
        yield
    except (OSError, EOFError, zlib.error) as error:  # gzip raises all of them
        reason = getattr(error, "strerror", None) or first_line(error)
        raise InputError(f"`inputs` must be readable files, got {path}: {reason}") from error


# --- from files to units, in one process ----------------------------------------------------------


def all_units(
    found: Sequence[Source], how: Reading, done: tuple[int, int] = (0, 0)
) -> Iterator[Unit]:
    """The units of all sources behind the place `done`; raises InputError for a damaged source."""
    for source_number, source in enumerate(found):
        if source_number >= done[0]:
            skipped = done[1] if source_number == done[0] else 0
            for number, unit in enumerate(_units(source, how), start=1):
                if number > skipped:
                    yield unit._replace(place=(source_number, number))


def _units(source: Source, how: Reading) -> Iterator[Unit]:
    if source.format == "parquet":
        yield from _rows(source, how)
        return
    with reading(source.path), source.path.open("rb") as raw:
        file: IO[bytes] = raw
        if source.compressed:
            file = io.BufferedReader(gzip.GzipFile(fileobj=raw), UNIT)
        if source.format == "lines":
            found = _lines(source, file, how)
        elif how.separator is None:
            found = _one_text(source, file, how)
        else:
            found = _separated(source, file, how, how.separator)
        for unit in found:
            yield unit._replace(read=raw.tell())


def _lines(source: Source, file: IO[bytes], how: Reading) -> Iterator[Unit]:
    number = 1
    while lines := file.readlines(how.unit):
        yield Unit(source, number, lines, 0)
        number += len(lines)


def _one_text(source: Source, file: IO[bytes], how: Reading) -> Iterator[Unit]:
    """The pieces of a file that is one document, so that it need not fit in memory."""
    first, rest, held_out = 0, b"", False
    while text := rest + file.read(how.unit + 1 - len(rest)):
        piece = _first_piece(text, how.unit)
        if first == 0:
            held_out = is_held_out(piece, how.share)
        yield Unit(source, first, [piece], 0, first > 0, held_out)
        first, rest = first + len(piece), text[len(piece) :]


def _separated(source: Source, file: IO[bytes], how: Reading, separator: bytes) -> Iterator[Unit]:
    first, rest = 0, b""
    while block := file.read(max(how.unit, len(rest))):  # doubled, so as to search less again
        *texts, rest = (rest + block).split(separator)
        if texts:
            yield Unit(source, first, texts, 0)
            first += sum(map(len, texts)) + len(separator) * len(texts)
    if rest:
        yield Unit(source, first, [rest], 0)


def _rows(source: Source, how: Reading) -> Iterator[Unit]:
    """The texts of a parquet file, a few rows at a time."""
    from pyarrow import ArrowException, large_binary

    number, texts, length = 1, list[bytes](), 0
    size = source.path.stat().st_size
    try:
        file = _open_parquet(source.path, how.field)
        total = max(1, file.metadata.num_rows)
        for batch in file.iter_batches(BATCH, columns=[how.field], use_threads=False):
            for text in batch.column(0).cast(large_binary()).to_pylist():
                if text is None:
                    raise _bad(source, f"row {number + len(texts)} is null")
                texts.append(text)
                length += len(text)
                if length >= how.unit:
                    yield Unit(source, number, texts, size * (number + len(texts) - 1) // total)
                    number, texts, length = number + len(texts), [], 0
    except (ArrowException, OSError) as error:
        got = first_line(error)
        raise InputError(f"`inputs` must be readable parquet, got {source.path}: {got}") from error
    if texts:
        yield Unit(source, number, texts, size)


def _open_parquet(path: Path, field: str) -> Any:
    """Open a parquet file that streams its pages instead of reading whole column chunks."""
    from pyarrow import parquet, types

    file = parquet.ParquetFile(path, buffer_size=UNIT, pre_buffer=False)
    columns = {column.name: column.type for column in file.schema_arrow}
    if field not in columns:
        raise InputError(
            f"`text_field` must be a column of {path}, one of {', '.join(columns)}, got {field!r}"
        )
    if not (types.is_string(columns[field]) or types.is_large_string(columns[field])):
        raise InputError(
            f"`text_field` must be a column of strings, got {field!r} of {path} with"
            f" {columns[field]}"
        )
    return file


# --- from units to documents, in any process ------------------------------------------------------


def pieces(unit: Unit, how: Reading) -> Iterator[Piece]:
    """The documents of a unit, long ones in several pieces; empty ones are left out.

    Raises InputError for text that is not UTF-8, and for a line that is no JSON object with a text.
    """
    for text in _texts(unit, how):
        start, begins, held_out = 0, not unit.continues, unit.held_out
        while start < len(text):
            piece = _first_piece(text[start : start + how.unit + 1], how.unit)
            if held_out is None:
                held_out = is_held_out(piece, how.share)
            yield Piece(piece, begins, held_out)
            start, begins = start + len(piece), False


def is_held_out(text: bytes, share: float) -> bool:
    """Whether a document is held out, by a hash of its first piece: copies are on one side."""
    digest = hashlib.blake2b(text, digest_size=HELD_OUT_BITS // 8).digest()
    return int.from_bytes(digest, "little") < share * 2**HELD_OUT_BITS


def _texts(unit: Unit, how: Reading) -> Iterator[bytes]:
    place = unit.first
    for item in unit.items:
        if unit.source.format == "lines":
            if item.strip():
                yield _text_of_line(unit.source, place, item, how.field)
        else:
            _check_utf8(unit.source, place, item)
            yield item
        is_text = unit.source.format == "text"
        place += len(item) + len(how.separator or b"") if is_text else 1


def _check_utf8(source: Source, place: int, text: bytes) -> None:
    try:
        text.decode("utf-8")
    except UnicodeDecodeError as error:
        problem = f"row {place} is not UTF-8"
        if source.format == "text":
            at = f"byte {place + error.start}"
            problem = f"{at} is {text[error.start]:#04x} ({error.reason})"
        raise _bad(source, problem) from error


def _text_of_line(source: Source, number: int, line: bytes, field: str) -> bytes:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:
        reason = getattr(error, "msg", None) or first_line(error)
        raise _bad(source, f"line {number} is no JSON: {reason}") from error
    text = value.get(field) if isinstance(value, dict) else None
    if not isinstance(text, str):
        raise _bad(source, f"line {number} has no text in `text_field` = {field!r}")
    try:
        return text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise _bad(source, f"line {number} has half of a surrogate pair") from error


def _first_piece(text: bytes, most: int) -> bytes:
    """The first piece, of at most `most` bytes, of a text that need not be longer than most + 1.

    It is cut where most tokenizers do not encode across: in its last sixteenth behind the last line
    end, else before the last space, else before the last character.
    """
    if len(text) <= most:
        return text
    for mark, behind in ((b"\n", 1), (b" ", 0)):
        at = text.rfind(mark, most - most // 16, most - 1)
        if at > 0:
            return text[: at + behind]
    at = most - 1
    while at > 1 and text[at] & 0xC0 == 0x80:  # inside of a character
        at -= 1
    return text[:at]


def _bad(source: Source, problem: str) -> InputError:
    expected = {
        "text": "UTF-8 text",
        "lines": "JSON lines with a text each",
        "parquet": "parquet with a text in each row",
    }[source.format]
    return InputError(f"`inputs` must be {expected}, got {source.path}, whose {problem}")
