"""Turn units into documents, in any process: check the text, cut it, hold some documents out."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from typing import NamedTuple

from ddl.errors import first_line

from .sources import Reading, Source, Unit, damaged

HELD_OUT_BITS = 64
HEAD = 4096  # bytes that are looked at


class Piece(NamedTuple):
    """UTF-8 text that is encoded by itself: a document, or a part of a long one."""

    text: bytes
    begins: bool
    held_out: bool


def pieces(unit: Unit, how: Reading) -> Iterator[Piece]:
    """The documents of a unit, long ones in several pieces.

    Of a row without text comes an empty piece, to be counted; empty texts of a text file are left
    out. Raises InputError for text that is not UTF-8, and for a line that is no JSON object with a
    text or null.
    """
    for text in _texts(unit, how):
        if not text and unit.source.format != "text":
            yield Piece(b"", True, False)
        start, begins, held_out = 0, not unit.continues, unit.held_out
        while start < len(text):
            piece = first_piece(text[start : start + how.unit + 1], how.unit)
            if held_out is None:
                held_out = is_held_out(piece, how.share)
            yield Piece(piece, begins, held_out)
            start, begins = start + len(piece), False


def is_held_out(text: bytes, share: float) -> bool:
    """Whether a document is held out, by a hash of its first piece, so copies are on the same side.

    text: the first piece. share: of the documents that are held out, in [0, 1].
    """
    digest = hashlib.blake2b(text, digest_size=HELD_OUT_BITS // 8).digest()
    return int.from_bytes(digest, "little") < share * 2**HELD_OUT_BITS


def _texts(unit: Unit, how: Reading) -> Iterator[bytes]:
    place = unit.first
    for item in unit.items:
        if item is None:
            yield b""
        elif unit.source.format == "lines":
            if item.strip():
                yield _text_of_line(unit.source, place, item, how.field)
        else:
            _check_utf8(unit.source, place, item)
            yield item
        is_text = unit.source.format == "text"
        place += len(item or b"") + len(how.separator or b"") if is_text else 1


def looks_wide(text: bytes) -> bool:
    """Whether a text begins like UTF-16 or UTF-32, which may be valid UTF-8 with many zeros."""
    return text[:HEAD].count(0) > len(text[:HEAD]) // 8


def _check_utf8(source: Source, place: int, text: bytes) -> None:
    if looks_wide(text):
        raise damaged(source, f"byte {place} begins a text full of zero bytes, as UTF-16 has")
    try:
        text.decode("utf-8")
    except UnicodeDecodeError as error:
        problem = f"row {place} is not UTF-8"
        if source.format == "text":
            at = f"byte {place + error.start}"
            problem = f"{at} is {text[error.start]:#04x} ({error.reason})"
        raise damaged(source, problem) from error


def _text_of_line(source: Source, number: int, line: bytes, field: str) -> bytes:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:
        reason = getattr(error, "msg", None) or first_line(error)
        raise damaged(source, f"line {number} is no JSON: {reason}") from error
    text = value.get(field, 0) if isinstance(value, dict) else 0
    if text is None:
        return b""
    if not isinstance(text, str):
        problem = f"line {number} has no text in `text_field` = {field!r}"
        raise damaged(source, problem, ("text_field",))
    try:
        return text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise damaged(source, f"line {number} has half of a surrogate pair") from error


def first_piece(text: bytes, most: int) -> bytes:
    """The first piece, of at most `most` bytes, of a text of which most + 1 bytes are enough.

    Most tokenizers encode lines and words by themselves. So the cut is behind the last line end in
    the last sixteenth, else before the last space there, else before the last character.
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
