"""Encoding for `ddl prepare`: units of text to tokens, in this process or in several others."""

from __future__ import annotations

import os
import signal
import threading
from collections import deque
from collections.abc import Generator, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from multiprocessing import connection, get_context, parent_process
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ddl import environment
from ddl.errors import InputError
from ddl.models.tokenizers import ByteTokenizer, FileTokenizer, Tokenizer, restore

from .documents import Piece, pieces
from .sources import Reading, Unit

GROUP = 2**18  # bytes of text that are encoded at once; tokenizers keeps over 100 for each token
AHEAD = 3  # units in flight for each worker: waiting, being encoded, or done before their turn


class EncodedPart(NamedTuple):
    """EncodedPart of some documents, and where documents start among them, int64."""

    tokens: npt.NDArray[Any]
    starts: npt.NDArray[np.int64]


class Encoded(NamedTuple):
    """The tokens of a unit: of the training part and of the part that is held out.

    without_text: rows that are null or empty.
    """

    train: EncodedPart
    validation: EncodedPart
    without_text: int = 0

    @property
    def parts(self) -> tuple[EncodedPart, EncodedPart]:
        """The tokens, in the order of PARTS."""
        return self.train, self.validation


@dataclass
class Encoder:
    """Turns units into tokens.

    description: the tokenizer, as `describe` returns it. document_token: the token that is put
    before each document; None for none. dtype: of the tokens. how: how documents are found.
    """

    description: dict[str, Any]
    document_token: int | None
    dtype: str
    how: Reading
    _tokenizer: Tokenizer | None = None

    def __call__(self, unit: Unit) -> Encoded:
        train, validation, without_text = _Part(), _Part(), 0

        def full() -> Iterator[Piece]:
            nonlocal without_text
            for piece in pieces(unit, self.how):
                without_text += not piece.text
                if piece.text:
                    yield piece

        for group in _groups(full()):
            tokens = self._encode([piece.text for piece in group])
            for piece, encoded in zip(group, tokens, strict=True):
                part = validation if piece.held_out else train
                part.add(encoded, piece.begins, self._prefix)
        parts = train.joined(self.dtype), validation.joined(self.dtype)
        return Encoded(*parts, without_text=without_text)

    @property
    def _prefix(self) -> npt.NDArray[Any]:
        token = self.document_token
        return np.array([] if token is None else [token], self.dtype)

    def _encode(self, texts: list[bytes]) -> list[npt.NDArray[Any]]:
        if self._tokenizer is None:
            self._tokenizer = restore(self.description)
        if isinstance(self._tokenizer, ByteTokenizer):
            return [np.frombuffer(text, np.uint8) for text in texts]
        decoded = [text.decode("utf-8") for text in texts]
        if isinstance(self._tokenizer, FileTokenizer):
            encoded = self._tokenizer.encode_batch(decoded)
        else:
            encoded = [self._tokenizer.encode(text) for text in decoded]
        return [np.array(tokens, self.dtype) for tokens in encoded]


@dataclass
class _Part:
    """The tokens of one part of a unit, while they are collected."""

    found: list[npt.NDArray[Any]] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)
    length: int = 0
    begins: bool = False  # a document whose tokens are still to come

    def add(self, tokens: npt.NDArray[Any], begins: bool, prefix: npt.NDArray[Any]) -> None:
        """Append the tokens of a piece, after `prefix` if a document begins with it."""
        self.begins = begins or self.begins
        tokens = np.concatenate((prefix, tokens)) if begins and len(prefix) else tokens
        if self.begins and len(tokens):
            self.starts.append(self.length)
            self.begins = False
        self.found.append(tokens)
        self.length += len(tokens)

    def joined(self, dtype: str) -> EncodedPart:
        tokens = np.concatenate(self.found) if self.found else np.empty(0, dtype)
        return EncodedPart(tokens.astype(dtype, copy=False), np.array(self.starts, np.int64))


def _groups(found: Iterable[Piece]) -> Iterator[list[Piece]]:
    """Consecutive pieces together, of about GROUP bytes."""
    group, length = list[Piece](), 0
    for piece in found:
        group.append(piece)
        length += len(piece.text)
        if length >= GROUP:
            yield group
            group, length = [], 0
    if group:
        yield group


# --- in several processes -------------------------------------------------------------------------


def encode(
    units: Iterable[Unit], encoder: Encoder, workers: int
) -> Generator[tuple[Unit, Encoded], None, None]:
    """Encode units in their order; a unit comes back without its items.

    workers: processes that encode; 1 encodes in this one. Raises InputError if a unit cannot be
    encoded or a process ends.
    """
    if workers == 1:
        environment.set_default("TOKENIZERS_PARALLELISM", "false")  # processes share the cores
        for unit in units:
            yield unit._replace(items=[]), encoder(unit)
        return
    # Processes are spawned, because a fork of one with threads may hang.
    pool = ProcessPoolExecutor(workers, get_context("spawn"), _start_worker, (encoder,))
    waiting: deque[tuple[Unit, Future[Encoded]]] = deque()
    try:
        for unit in units:
            waiting.append((unit._replace(items=[]), pool.submit(_encode_in_worker, unit)))
            if len(waiting) >= AHEAD * workers:
                done, future = waiting.popleft()
                yield done, future.result()
        while waiting:
            done, future = waiting.popleft()
            yield done, future.result()
    except BrokenProcessPool as error:
        raise InputError(
            "workers",
            "fit on this machine",
            f"{workers}, one of which was ended from outside, perhaps for lack of memory",
        ) from error
    finally:
        pool.shutdown(cancel_futures=True)


_encoder: Encoder  # of a worker process


def _start_worker(encoder: Encoder) -> None:
    """Set up a worker process, which gets the encoder once instead of with every unit."""
    global _encoder
    _encoder = encoder
    environment.set_default("TOKENIZERS_PARALLELISM", "false")  # processes share the cores
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which ends this one
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """End this worker with its parent: a killed one cannot, and the worker would wait forever."""
    parent = parent_process()
    assert parent is not None
    connection.wait([parent.sentinel])
    os._exit(1)


def _encode_in_worker(unit: Unit) -> Encoded:
    return _encoder(unit)
