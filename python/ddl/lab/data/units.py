"""Cut the files into units, in one process and in bounded memory."""

from __future__ import annotations

import codecs
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any

from fsspec.compression import compr

from ddl.errors import InputError, first_line

from .documents import first_piece, is_held_out
from .sources import UNIT, Reading, Source, Unit, reading

BOM = codecs.BOM_UTF8  # belongs to no text
BATCH = 64  # rows of a parquet file that are in memory at once


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
        if source.compression is not None:
            file = compr[source.compression](raw, mode="rb")
        if file.read(len(BOM)) != BOM:
            file.seek(0)
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
    first, rest, held_out = file.tell(), b"", False
    begun = first
    while text := rest + file.read(how.unit + 1 - len(rest)):
        piece = first_piece(text, how.unit)
        if first == begun:
            held_out = is_held_out(piece, how.share)
        yield Unit(source, first, [piece], 0, first > begun, held_out)
        first, rest = first + len(piece), text[len(piece) :]


def _separated(source: Source, file: IO[bytes], how: Reading, separator: bytes) -> Iterator[Unit]:
    """The texts between separators; one may go on beyond a block."""
    first, rest = file.tell(), b""
    # A text longer than a block is searched again from its start, so the blocks double.
    while block := file.read(max(how.unit, len(rest))):
        *texts, rest = (rest + block).split(separator)
        if texts:
            yield Unit(source, first, texts, 0)
            first += sum(map(len, texts)) + len(separator) * len(texts)
    if rest:
        yield Unit(source, first, [rest], 0)


def _rows(source: Source, how: Reading) -> Iterator[Unit]:
    """The texts of a parquet file, a few rows at a time."""
    from pyarrow import ArrowException, large_binary, types

    number, texts, length = 1, list[bytes | None](), 0
    try:
        size = source.path.stat().st_size
        file = _open_parquet(source.path, how.field)
        total = max(1, file.metadata.num_rows)
        for batch in file.iter_batches(BATCH, columns=[how.field], use_threads=False):
            column = batch.column(0)
            if types.is_dictionary(column.type):
                column = column.dictionary_decode()
            for text in column.cast(large_binary()).to_pylist():
                texts.append(text)
                length += len(text or b"")
                if length >= how.unit:
                    yield Unit(source, number, texts, size * (number + len(texts) - 1) // total)
                    number, texts, length = number + len(texts), [], 0
    except (ArrowException, OSError) as error:
        got = first_line(error)
        raise InputError("inputs", "be readable parquet", f"{source.path}: {got}") from error
    if texts:
        yield Unit(source, number, texts, size)


def _open_parquet(path: Path, field: str) -> Any:
    """Open a parquet file that streams its pages instead of reading whole column chunks."""
    from pyarrow import parquet, types

    file = parquet.ParquetFile(path, buffer_size=UNIT, pre_buffer=False)
    columns = {column.name: column.type for column in file.schema_arrow}
    if field not in columns:
        raise InputError(
            "text_field", f"be a column of {path}, one of {', '.join(columns)}", repr(field)
        )
    kind = columns[field]
    kind = kind.value_type if types.is_dictionary(kind) else kind
    known = (types.is_string, types.is_large_string, types.is_string_view, types.is_null)
    if not any(is_one(kind) for is_one in known):
        raise InputError(
            "text_field", "be a column of strings", f"{field!r} of {path} with {columns[field]}"
        )
    return file
