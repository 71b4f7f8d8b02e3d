"""Check the content of shards, of which their sizes say nothing: checksums, tokens, starts."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from rich.console import Console
from rich.progress import DownloadColumn

from ddl.errors import InputError, reason_of
from ddl.lab.machine import usable_cores
from ddl.lab.progress import passing_bar

from .corpus import Corpus
from .shards import CHANGED, COPY_AGAIN, INDEX, STARTS, Shard, Shards

BLOCK = 2**22  # bytes that are read at once

Numbers = npt.NDArray[Any]
Advance = Callable[[int], object]  # called with a number of bytes that were read


def verify_corpus(corpus: Corpus, console: Console, share: tuple[int, int] = (0, 1)) -> None:
    """Verify the shards of a corpus under a progress bar; other corpora have nothing to verify.

    share: as in `verify`. Raises InputError for a damaged shard.
    """
    with passing_bar(console, DownloadColumn()) as bar:
        task = bar.add_task("checking data", total=size_of(corpus.shards) / share[1])
        verify(
            corpus.shards,
            corpus.tokenizer.vocab_size,
            lambda count: bar.advance(task, count),
            share,
        )


def verify(
    parts: Sequence[Shards],
    vocab_size: int,
    advance: Advance = lambda count: None,
    share: tuple[int, int] = (0, 1),
) -> None:
    """Raise InputError, which names the file, unless the shards are as their index says.

    Each file has to have its checksum, each token to be one of the vocabulary, and the starts of
    documents to ascend within the shard. Every file is read once, on all cores. share: (r, n)
    checks the shards r, r + n, ….
    """
    todo = [
        (shards, shard, shard is shards.listed[0]) for shards in parts for shard in shards.listed
    ][share[0] :: share[1]]
    pool = ThreadPoolExecutor(usable_cores())  # hashing releases the GIL
    try:
        started = [pool.submit(_check, *each, vocab_size, advance) for each in todo]
        for done in as_completed(started):
            done.result()
    finally:
        pool.shutdown(cancel_futures=True)


def size_of(parts: Sequence[Shards]) -> int:
    """Bytes of all files of these shards."""
    return sum(
        shard.tokens * shards.dtype.itemsize + shard.documents * np.dtype(STARTS).itemsize
        for shards in parts
        for shard in shards.listed
    )


def _check(shards: Shards, shard: Shard, first: bool, vocab_size: int, advance: Advance) -> None:
    tokens, starts = (shards.folder / name for name in shard.files)
    dtype = shards.dtype.newbyteorder("<")
    _read(tokens, shard.sha256, dtype, _Tokens(vocab_size), advance)
    _read(starts, shard.starts_sha256, np.dtype(STARTS), _Starts(shard.tokens, first), advance)


def _read(
    path: Path,
    expected: str,
    dtype: np.dtype[Any],
    look: Callable[[Numbers], str | None],
    advance: Advance,
) -> None:
    """Read a file once; raise InputError if its checksum is another, or for what `look` returns."""
    digest, problem = hashlib.sha256(), None
    try:
        with path.open("rb") as file:
            while block := file.read(BLOCK):
                digest.update(block)
                numbers = np.frombuffer(block, dtype, count=len(block) // dtype.itemsize)
                problem = problem or look(numbers)
                advance(len(block))
    except OSError as error:
        problem = f"which cannot be read: {reason_of(error)}"
    else:
        if digest.hexdigest() != expected:
            problem = CHANGED
    if problem is not None:
        raise InputError(
            "data",
            f"have the shards of its {INDEX}",
            f"{path}, {problem}; {COPY_AGAIN}",
        )


class _Tokens:
    """Looks for tokens that are none of the vocabulary."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size

    def __call__(self, tokens: Numbers) -> str | None:
        if np.iinfo(tokens.dtype).max < self._vocab_size or len(tokens) == 0:
            return None
        largest = int(tokens.max())
        if largest < self._vocab_size:
            return None
        return f"which has token {largest}, beyond its vocabulary of {self._vocab_size}"


class _Starts:
    """Looks for starts of documents that do not ascend within their shard, block after block.

    first: whether the shard is the first of its part, so that a document begins it.
    """

    def __init__(self, tokens: int, first: bool) -> None:
        self._tokens, self._first, self._before = tokens, first, -1

    def __call__(self, starts: Numbers) -> str | None:
        if len(starts) == 0:
            return None
        if self._first and self._before < 0 < starts[0]:
            return f"whose first document starts at token {starts[0]}"
        if starts.max() >= self._tokens:
            return f"which has a document start at {starts.max()}, beyond its {self._tokens} tokens"
        signed = np.concatenate(([self._before], starts.astype(np.int64)))
        self._before = int(signed[-1])
        if (signed[1:] <= signed[:-1]).any():
            return "whose document starts do not ascend"
        return None
