"""Corpora: a text file's bytes, nanoGPT's token files, or Python's own documentation.

Files are memory-mapped; a batch copies only its own windows.
"""

from __future__ import annotations

import codecs
import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ddl.errors import InputError

from .tokenizer import ByteTokenizer, GPT2Tokenizer, Tokenizer, describe, read_meta

Tokens = npt.NDArray[Any]  # one dimension, uint8 or uint16

EMBEDDED = "topics"
VALIDATION_SHARE = 10  # the last tenth of a text is kept for validation
CHUNK = 2**20
WHOLE, BLOCKS, BLOCK = 64 * 2**20, 1024, 64 * 2**10  # what a checksum takes, in bytes


@dataclass(frozen=True)
class Corpus:
    """Training and validation tokens, and the tokenizer that decodes them."""

    name: str
    train: Tokens
    validation: Tokens
    tokenizer: Tokenizer

    def checksum(self) -> str:
        """SHA-256 of the tokens and the tokenizer, to notice that a corpus has changed.

        Of an array of more than 64 MiB it takes 1,024 blocks of 64 KiB, spread evenly.
        """
        digest = hashlib.sha256(json.dumps(describe(self.tokenizer)).encode())
        for tokens in (self.train, self.validation):
            digest.update(f"{len(tokens)} {tokens.dtype}".encode())
            for block in _sampled(tokens.view(np.uint8)):
                digest.update(block)
        return digest.hexdigest()

    def check(self, block_size: int, vocab_size: int) -> None:
        """Raise InputError unless a model of these sizes can train on this corpus."""
        if self.tokenizer.vocab_size > vocab_size:
            raise InputError(
                f"`vocab_size` must be at least {self.tokenizer.vocab_size} for {self.name},"
                f" got {vocab_size}"
            )
        for part, tokens in (("training", self.train), ("validation", self.validation)):
            if len(tokens) < block_size:
                raise InputError(
                    f"the {part} part of {self.name} must have at least one block of {block_size}"
                    f" tokens, got {len(tokens)}"
                )


def load(source: str | Path | None) -> Corpus:
    """Open a corpus.

    source: "topics" (Python's documentation), a text file, or a directory with train.bin and
    val.bin. A text is read as bytes (vocabulary 256); its last tenth is the validation part. A
    directory has uint16 tokens of GPT-2, or of the table in its meta.pkl. Raises InputError if the
    source is missing, unreadable, empty or not UTF-8.
    """
    if source is None:
        raise InputError(
            "`data` must name a UTF-8 text file or a directory with train.bin and val.bin,"
            " got nothing"
        )
    if str(source) == EMBEDDED:
        return _split("Python's documentation", np.frombuffer(embedded_text(), dtype=np.uint8))
    path = Path(source)
    if path.is_dir():
        return _load_directory(path)
    tokens = _map(path, "`data`", "a text file or a directory", np.uint8)
    _check_utf8(path, tokens)
    return _split(f"`{path}`", tokens)


def embedded_text() -> bytes:
    """The language documentation in CPython's `pydoc_data.topics`, as UTF-8.

    A fifth of its paragraphs repeat earlier ones. Repetitions are removed; otherwise the training
    part would contain some of the validation part.
    """
    try:
        from pydoc_data import topics
    except ImportError as error:
        raise InputError(
            "`data` must name a text file here, because this Python lacks pydoc_data.topics"
        ) from error
    paragraphs = "\n\n".join(topics.topics.values()).split("\n\n")
    return "\n\n".join(dict.fromkeys(paragraphs)).encode("utf-8")


def batch(
    tokens: Tokens, batch_size: int, block_size: int, *, seed: int, step: int, first: int = 0
) -> Tensor:
    """Cut windows `first` … `first + batch_size - 1` of a step's global batch out of `tokens`.

    Returns (batch_size, block_size) int64. A window is a function of (seed, step, its index) alone,
    so a resumed run and any division of the global batch see the same ones.
    """
    # A bit generator's stream is the same in every version of NumPy; a distribution's may change.
    key = np.array([seed, step], dtype=np.uint64)
    numbers = np.random.Philox(key=key).random_raw(first + batch_size)[first:]
    uniform = (numbers >> np.uint64(11)) * 2.0**-53  # in [0, 1)
    starts = (uniform * (len(tokens) - block_size + 1)).astype(np.int64)
    return _windows(tokens, starts.tolist(), block_size)


def evaluation_batches(
    tokens: Tokens, batch_size: int, block_size: int, count: int
) -> Iterator[Tensor]:
    """Yield windows that do not overlap, spread evenly over `tokens`, the same on every call.

    Batches are (≤ batch_size, block_size) int64. count: most batches; 0 yields every window.
    """
    windows = len(tokens) // block_size
    wanted = min(windows, count * batch_size) if count else windows
    starts = [(i * windows // wanted) * block_size for i in range(wanted)]
    for first in range(0, wanted, batch_size):
        yield _windows(tokens, starts[first : first + batch_size], block_size)


def _sampled(content: Tokens) -> Iterator[bytes]:
    if len(content) <= WHOLE:
        yield content.tobytes()
        return
    for i in range(BLOCKS):
        start = i * (len(content) - BLOCK) // (BLOCKS - 1)
        yield content[start : start + BLOCK].tobytes()


def _windows(tokens: Tokens, starts: list[int], block_size: int) -> Tensor:
    stacked = np.stack([tokens[start : start + block_size] for start in starts])
    return torch.from_numpy(stacked.astype(np.int64))


def _split(name: str, tokens: Tokens) -> Corpus:
    cut = len(tokens) - len(tokens) // VALIDATION_SHARE
    return Corpus(name, tokens[:cut], tokens[cut:], ByteTokenizer())


def _load_directory(path: Path) -> Corpus:
    expected = "a directory with train.bin and val.bin"
    train = _map(path / "train.bin", f"`data` = {path}", expected, np.uint16)
    validation = _map(path / "val.bin", f"`data` = {path}", expected, np.uint16)
    meta = path / "meta.pkl"
    tokenizer: Tokenizer = read_meta(meta) if meta.exists() else GPT2Tokenizer()
    return Corpus(f"`{path}`", train, validation, tokenizer)


def _map(path: Path, argument: str, expected: str, dtype: type[np.generic]) -> Tokens:
    """Memory-map a file of `dtype`; raise InputError if that is impossible."""
    item = np.dtype(dtype).itemsize
    try:
        size = path.stat().st_size
        if size == 0:
            problem = "which is empty"
        elif size % item:
            problem = f"whose {size} bytes are no whole number of {item}-byte tokens"
        else:
            return np.memmap(path, dtype=dtype, mode="r")
    except OSError as error:
        problem = f"which cannot be read: {error.strerror or error}"
    raise InputError(f"{argument} must be {expected}, got {path}, {problem}")


def _check_utf8(path: Path, tokens: Tokens) -> None:
    decoder = codecs.getincrementaldecoder("utf-8")()
    for start in range(0, len(tokens), CHUNK):
        chunk = tokens[start : start + CHUNK].tobytes()
        carried = len(decoder.getstate()[0])  # bytes of a character that the last chunk split
        try:
            decoder.decode(chunk, final=start + CHUNK >= len(tokens))
        except UnicodeDecodeError as error:
            at = start - carried + error.start
            raise InputError(
                f"`data` must be UTF-8 text, got {path}, whose byte {at} is"
                f" {error.object[error.start]:#04x} ({error.reason})"
            ) from error
