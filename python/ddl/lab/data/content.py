"""Recognise by suffix and first bytes content that is no UTF-8 text, or not that of its suffix."""

from __future__ import annotations

import codecs
import re
from pathlib import Path
from typing import Literal, NamedTuple

HEAD = 4096  # bytes that are looked at
BOM = codecs.BOM_UTF8  # belongs to no text

COMPRESSIONS = {
    ".zst": "zstd",
    ".xz": "xz",
    ".lzma": "lzma",
    ".bz2": "bzip2",
    ".lz4": "lz4",
    ".br": "brotli",
    ".sz": "snappy",
    ".z": "compress",
    ".zip": "zip",
    ".7z": "7-Zip",
}
GZIP = re.compile(rb"\x1f\x8b\x08")
PARQUET = re.compile(rb"PAR1.*[\0-\x08]", re.DOTALL)  # a text, too, may begin with these letters
ARROW = re.compile(rb"ARROW1\0\0")
TAR = re.compile(rb".{257}ustar", re.DOTALL)
MAGIC = {
    re.compile(rb"\x28\xb5\x2f\xfd"): "zstd",
    re.compile(rb"\xfd7zXZ\0"): "xz",
    re.compile(rb"BZh[1-9]1AY&SY"): "bzip2",
    re.compile(rb"\x04\x22\x4d\x18"): "lz4",
    re.compile(rb"\xff\x06\0\0sNaPpY"): "snappy",
    re.compile(rb"\x1f\x9d"): "compress",
    re.compile(rb"PK\x03\x04"): "zip",
    re.compile(rb"7z\xbc\xaf\x27\x1c"): "7-Zip",
}
# UTF-32's marks first: that of UTF-16LE begins like one of them.
MARKS = {
    codecs.BOM_UTF32_LE: "UTF-32",
    codecs.BOM_UTF32_BE: "UTF-32",
    codecs.BOM_UTF16_LE: "UTF-16",
    codecs.BOM_UTF16_BE: "UTF-16",
}


class Foreign(NamedTuple):
    """The kind of a file that should be another, and what to do about it."""

    what: str
    advice: str

    def __str__(self) -> str:
        return f"{self.what}: {self.advice}"


def inner(path: Path) -> Path:
    """The path without the suffix of a compression."""
    return path.with_suffix("") if path.suffix.lower() in (".gz", *COMPRESSIONS) else path


def foreign(
    name: Path, head: bytes, expected: Literal["text", "gzip", "parquet"] = "text"
) -> Foreign | None:
    """Say what a file is if it is certainly not what is expected; else None.

    name: its suffix counts, because brotli can be known by nothing else. head: its first HEAD
    bytes, or fewer if it has no more. expected: text that is UTF-8, gzip or parquet.
    """
    marked = (packed for magic, packed in MAGIC.items() if magic.match(head))
    packed = COMPRESSIONS.get(name.suffix.lower()) or next(marked, None)
    if packed is not None:
        return Foreign(f"compressed with {packed}", "decompress it, or use gzip")
    if expected != "gzip" and GZIP.match(head):
        advice = "decompress it" if expected == "parquet" else "give it the suffix .gz"
        return Foreign("compressed with gzip", advice)
    if expected != "parquet" and PARQUET.match(head):
        advice = "decompress it" if expected == "gzip" else "give it the suffix .parquet"
        return Foreign("parquet", advice)
    if expected != "text":
        return None
    if ARROW.match(head):
        return Foreign("an Arrow file", "write it as parquet")
    if TAR.match(head):
        return Foreign("a tar archive", "unpack it")
    encoding = wide_encoding(head)
    if encoding is None:
        return None
    return Foreign(encoding, f"convert it to UTF-8, as with iconv -f {encoding} -t UTF-8")


def wide_encoding(head: bytes) -> str | None:
    """UTF-16 or UTF-32 if a text's first bytes look like it, with a mark or without; else None.

    Without a mark it is known by zero bytes in the same places, which ASCII, and in spaces and line
    ends many other scripts have. UTF-8 has them in the rare U+0000 alone.
    """
    for mark, name in MARKS.items():
        if head.startswith(mark):
            return name
    whole = head[: len(head) // 4 * 4]
    if not whole:
        return None
    zeros = [whole[place::4].count(0) for place in range(4)]
    all_of_them = len(whole) // 4
    if zeros[2] == zeros[3] == all_of_them > zeros[0]:
        return "UTF-32LE"
    if zeros[0] == zeros[1] == all_of_them > zeros[3]:
        return "UTF-32BE"
    even, odd = zeros[0] + zeros[2], zeros[1] + zeros[3]
    found = max(even, odd)
    dense = found >= max(2, len(whole) // 4)
    if min(even, odd) == 0 and (dense or found >= max(16, len(whole) // 100)):
        return "UTF-16BE" if even else "UTF-16LE"
    return None
