"""Shards: the directory that `ddl prepare` writes, and its tokens as one memory-mapped sequence.

    index.json                      what is in the others, and of what it was made
    tokenizer.json                  the tokenizer, as in a run directory
    train-00000.bin, …              tokens, little-endian; the index has their dtype
    train-00000.starts, …           where documents start in that shard, uint64, little-endian
    validation-00000.bin, …         the documents that are held out, in shards of the same numbers

A part without tokens has no files of a number. A document may go on in the next shard.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
import numpy.typing as npt

from ddl.errors import NEWER, InputError, check_fields, first_line, reason_of
from ddl.files import atomic_file, write_text
from ddl.models.tokenizers import Tokenizer, describe, restore_json

INDEX, TOKENIZER = "index.json", "tokenizer.json"
FORMAT, VERSION = "ddl-shards", 1
TRAIN, VALIDATION = "train", "validation"
PARTS = (TRAIN, VALIDATION)
DTYPES = ("uint8", "uint16", "uint32")
STARTS = "<u8"
SUFFIXES = (".bin", ".starts")
SUM = re.compile("[0-9a-f]{64}")
CHANGED = "whose checksum is another: it was damaged or changed"
COPY_AGAIN = "copy the file again, or remove the directory and prepare it again"


@dataclass(frozen=True)
class Shard:
    """One file of tokens and one of document starts; `name` is theirs without the suffix."""

    name: str
    tokens: int
    documents: int
    sha256: str
    starts_sha256: str

    @property
    def files(self) -> dict[str, str]:
        """The SHA-256 of each file by its name."""
        return {f"{self.name}.bin": self.sha256, f"{self.name}.starts": self.starts_sha256}


@dataclass
class Index:
    """The content of index.json.

    made_of: versions, options and sources, as JSON values. next: (number of the source, units of it
    that are done), from which an unfinished preparation goes on; None once it is complete.
    largest_token: −1 if there is none yet. without_text: rows of the sources that are null or
    empty.
    """

    dtype: str
    vocab_size: int
    made_of: dict[str, Any]
    largest_token: int = -1
    without_text: int = 0
    next: tuple[int, int] | None = (0, 0)
    shards: dict[str, list[Shard]] = field(default_factory=lambda: {part: [] for part in PARTS})

    def tokens(self, part: str) -> int:
        """Tokens of a part, over all its shards."""
        return sum(shard.tokens for shard in self.shards[part])

    def documents(self, part: str) -> int:
        """Documents of a part, over all its shards."""
        return sum(shard.documents for shard in self.shards[part])

    def write(self, folder: Path) -> None:
        """Write index.json atomically."""
        totals = {
            part: {"tokens": self.tokens(part), "documents": self.documents(part)} for part in PARTS
        }
        values = {"format": FORMAT, "version": VERSION, **dataclasses.asdict(self)}
        write_text(folder / INDEX, json.dumps(values | {"totals": totals}, indent=1))


def is_prepared(folder: Path) -> bool:
    """Whether `ddl prepare` has written, or begun, this directory."""
    return (folder / INDEX).is_file()


def read_index(folder: Path, *, argument: str = "data") -> Index:
    """Read index.json; raise InputError if it is missing, damaged or of another format."""
    path = folder / INDEX
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        known = values.pop("format"), values.pop("version")
        if known != (FORMAT, VERSION):
            raise ValueError(f"format {known[0]!r}, version {known[1]!r}; {NEWER}")
        del values["totals"]
        shards = {part: [Shard(**shard) for shard in values["shards"][part]] for part in PARTS}
        follows = values.pop("next")
        values |= {"shards": shards, "next": None if follows is None else tuple(follows)}
        check_fields(Index, values)
        index = Index(**values)
        _check(index)
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        got = first_line(error)
        raise InputError(
            argument, "be a directory of `ddl prepare`", f"{path}, which is no such index: {got}"
        ) from error
    return index


def _check(index: Index) -> None:
    if index.dtype not in DTYPES:
        raise ValueError(f"dtype {index.dtype!r}")
    if type(index.without_text) is not int:
        raise TypeError(f"without_text {index.without_text!r}")
    place = index.next
    if place is not None and not (
        len(place) == 2 and all(type(n) is int and n >= 0 for n in place)
    ):
        raise ValueError(f"next {place!r}")
    for section, kind in (("options", dict), ("versions", dict), ("sources", list)):
        if not isinstance(index.made_of[section], kind):
            raise TypeError(f"{section} {index.made_of[section]!r}")
    for part, shards in index.shards.items():
        for shard in shards:
            numbers = (shard.tokens, shard.documents, index.largest_token, index.vocab_size)
            if not all(isinstance(number, int) for number in numbers):
                raise TypeError("numbers that are not integers")
            if not all(isinstance(s, str) and SUM.fullmatch(s) for s in shard.files.values()):
                raise ValueError(f"checksums of {shard.name!r} that are not SHA-256")
            if not (shard.name.startswith(f"{part}-") and shard.name[len(part) + 1 :].isdigit()):
                raise ValueError(f"a shard {shard.name!r}")


class ShardWriter:
    """Writes one shard of a part; its files appear, complete, when `files` is closed.

    files: the stack that closes and renames the files. A shard without tokens has no files.
    """

    def __init__(self, folder: Path, part: str, number: int, dtype: str, files: ExitStack) -> None:
        self.name = f"{part}-{number:05}"
        self.tokens = self.documents = 0
        self.largest = -1
        self._folder, self._dtype, self._files = folder, dtype, files
        self._opened: dict[str, BinaryIO] = {}
        self._sums = {suffix: hashlib.sha256() for suffix in SUFFIXES}

    def append(self, tokens: npt.NDArray[Any], starts: npt.NDArray[np.int64]) -> None:
        """Add tokens, and the places among them where documents start."""
        if len(tokens) == 0:
            return
        if not self._opened:
            for suffix in SUFFIXES:
                final = self._folder / (self.name + suffix)
                temporary = self._files.enter_context(atomic_file(final))
                self._opened[suffix] = self._files.enter_context(temporary.open("wb"))
        data = (tokens.astype(_little_endian(self._dtype)), (starts + self.tokens).astype(STARTS))
        for suffix, array in zip(SUFFIXES, data, strict=True):
            self._opened[suffix].write(array.data)
            self._sums[suffix].update(array.data)
        self.tokens += len(tokens)
        self.documents += len(starts)
        self.largest = max(self.largest, int(tokens.max()))

    def shard(self) -> Shard:
        """The entry of the index."""
        sums = (self._sums[suffix].hexdigest() for suffix in SUFFIXES)
        return Shard(self.name, self.tokens, self.documents, *sums)


class Shards:
    """The tokens of one part of a prepared directory, as if they were one array.

    `shards[a:b]` copies a window, across the borders of shards; `len` is the number of tokens.
    """

    def __init__(self, folder: Path, index: Index, part: str) -> None:
        listed = index.shards[part]
        self.folder, self.listed = folder, listed
        dtype = _little_endian(index.dtype)
        self._tokens = [_map(folder / f"{s.name}.bin", dtype, s.tokens) for s in listed]
        self._starts = [_map(folder / f"{s.name}.starts", STARTS, s.documents) for s in listed]
        self._borders = np.cumsum([0, *(shard.tokens for shard in listed)])
        self.dtype = np.dtype(index.dtype)
        sums = [f"{digest}\n" for shard in listed for digest in shard.files.values()]
        self.checksum = hashlib.sha256("".join(sums).encode()).hexdigest()

    def __len__(self) -> int:
        return int(self._borders[-1])

    def __getitem__(self, window: slice) -> npt.NDArray[Any]:
        """The tokens in a window (start, stop, no step), in a new array of `dtype`."""
        first, last, _ = window.indices(len(self))
        out = np.empty(max(0, last - first), self.dtype)
        for span in self._spans(first, last):
            tokens = uncut(self._tokens[span.shard])
            out[span.at : span.at + span.end - span.begin] = tokens[span.begin : span.end]
        return out

    def document_starts(self, window: slice) -> npt.NDArray[np.bool_]:
        """A bool for each token in a window, True for the first one of a document."""
        first, last, _ = window.indices(len(self))
        out = np.zeros(max(0, last - first), np.bool_)
        for span in self._spans(first, last):
            starts = uncut(self._starts[span.shard])
            # Of the same dtype: NumPy would convert the whole file to another one.
            low, high = np.searchsorted(starts, np.array((span.begin, span.end), starts.dtype))
            out[starts[low:high].astype(np.int64) - span.begin + span.at] = True
        return out

    def _spans(self, first: int, last: int) -> Iterator[_Span]:
        """The parts of shards that the tokens first … last − 1 consist of."""
        number, position = int(np.searchsorted(self._borders, first, side="right")) - 1, first
        while position < last:
            begin, end = int(self._borders[number]), int(self._borders[number + 1])
            yield _Span(number, position - begin, min(last, end) - begin, position - first)
            number, position = number + 1, end


class _Span(NamedTuple):
    """Tokens begin … end − 1 of a shard, and the place of the first one in a window."""

    shard: int
    begin: int
    end: int
    at: int


def _little_endian(dtype: str) -> np.dtype[Any]:
    """A dtype in the byte order of the files, which does not depend on the machine."""
    return np.dtype(dtype).newbyteorder("<")


def uncut(tokens: Any) -> Any:
    """Return tokens as they are; raise InputError if their file was cut short since it was mapped.

    To read beyond a file's end would end the process, by SIGBUS.
    """
    pages = getattr(tokens, "_mmap", None)
    if pages is not None and pages.size() < len(pages):
        got = f"{tokens.filename}, now with {pages.size()}"
        raise InputError("data", f"keep the {len(pages)} bytes that it was opened with", got)
    return tokens


def map_file(
    path: Path, dtype: npt.DTypeLike, expected: str, problem_of: Callable[[int], str | None]
) -> npt.NDArray[Any]:
    """Memory-map a file; raise InputError if that is impossible, or its number of bytes a problem.

    expected: of `data`, for the error.
    """
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            problem = problem_of(size)
            if problem is None and size == 0:
                return np.empty(0, dtype)
            if problem is None:
                array = np.memmap(file, dtype, "r")
                array.filename = str(path)  # for `uncut`
                return array
    except OSError as error:
        problem = f"which cannot be read: {reason_of(error)}"
    raise InputError("data", expected, f"{path}, {problem}")


def _map(path: Path, dtype: npt.DTypeLike, length: int) -> npt.NDArray[Any]:
    """Memory-map a file of a shard; raise InputError unless it has its length."""
    whole = length * np.dtype(dtype).itemsize
    expected = f"have the shards of its {INDEX}, {path.name} with {whole} bytes"
    return map_file(
        path, dtype, expected, lambda size: None if size == whole else f"which has {size} bytes"
    )


def tokenizer_sum(tokenizer: Tokenizer) -> str:
    """The tokenizer as the options in an index and a checkpoint name it: its kind, and the SHA-256
    of what tokenizer.json says."""
    described = json.dumps(describe(tokenizer)).encode()
    return f"{tokenizer.kind}, sha256 {hashlib.sha256(described).hexdigest()}"


def read_tokenizer(folder: Path, index: Index) -> Tokenizer:
    """Read tokenizer.json of a prepared directory; raise InputError if it is damaged, or another
    than that of the index."""
    path = folder / TOKENIZER
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(path, "be JSON", first_line(error)) from error
    tokenizer = restore_json(text, path)
    if tokenizer_sum(tokenizer) != index.made_of["options"].get("tokenizer"):
        raise InputError(
            "data", f"have the tokenizer of its {INDEX}", f"{path}, {CHANGED}; {COPY_AGAIN}"
        )
    return tokenizer


def open_shards(folder: Path) -> tuple[Index, Shards, Shards, Tokenizer]:
    """Open a complete directory of `ddl prepare`: index, training and validation part, tokenizer.

    Raises InputError if the preparation was interrupted, or a file is missing or damaged.
    """
    index = read_index(folder)
    if index.next is not None:
        raise InputError(
            "data",
            "be a complete directory of `ddl prepare`",
            f"{folder}, which was interrupted: run the same command again, and it goes on",
        )
    train, validation = (Shards(folder, index, part) for part in PARTS)
    return index, train, validation, read_tokenizer(folder, index)
