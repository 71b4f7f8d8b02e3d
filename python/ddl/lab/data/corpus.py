"""Corpora: shards of `ddl prepare`, a text file's bytes, nanoGPT's token files, or Python's own
documentation.

Files are memory-mapped; a batch copies only its own windows.
"""

from __future__ import annotations

import codecs
import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ddl.errors import InputError
from ddl.models.tokenizers import ByteTokenizer, GPT2Tokenizer, Tokenizer, describe, read_meta
from ddl.paths import at_home

from .documents import HEAD, looks_wide
from .shards import Shards, is_prepared, map_file, open_shards, uncut

if TYPE_CHECKING:  # the worker processes of `ddl prepare` do not wait for torch
    from torch import Tensor

Array = npt.NDArray[Any]  # one dimension, uint8 or uint16
Tokens = Array | Shards  # both have a length and windows tokens[a:b]

EMBEDDED = "topics"
VALIDATION_SHARE = 10  # the last tenth of a text is kept for validation
CHUNK = 2**20
HASHED_WHOLE = 64 * 2**20  # bytes; of a longer part, evenly spaced blocks are hashed
SAMPLES, SAMPLE = 1024, 64 * 2**10  # number and bytes of the blocks that are hashed then
# Token files with a header: of llm.c and modded-nanogpt, of llm.c for Llama 3, and NumPy's.
LLM_C, HEADER = (20240520).to_bytes(4, "little"), 512  # in tokens
OTHERS = {
    (20240801).to_bytes(4, "little"): "has llm.c's tokens of Llama 3",
    b"\x93NUMPY": "is an array of numpy.save",
}


@dataclass(frozen=True)
class Corpus:
    """Training and validation tokens, and the tokenizer that decodes them.

    largest_token: the largest number in both parts. validated_on: the name of the validation part,
    if it was not held out of the corpus.
    """

    name: str
    train: Tokens
    validation: Tokens
    tokenizer: Tokenizer
    largest_token: int
    validated_on: str | None = None

    def check(self, block_size: int, vocab_size: int) -> None:
        """Raise InputError unless a model of these sizes can train on this corpus."""
        if self.tokenizer.vocab_size > vocab_size:
            raise InputError(
                "vocab_size", f"be at least {self.tokenizer.vocab_size} for {self.name}", vocab_size
            )
        if self.largest_token >= vocab_size:
            raise InputError.sentence(
                f"{self.name} must hold tokens below `vocab_size` = {vocab_size}, got"
                f" {self.largest_token}",
                ("vocab_size",),
            )
        own = self.validated_on or self.name
        for part, name, tokens in (
            ("training", self.name, self.train),
            ("validation", own, self.validation),
        ):
            if len(tokens) < block_size:
                raise InputError.sentence(
                    f"the {part} part of {name} must have at least one block of {block_size}"
                    f" tokens, got {len(tokens)}"
                )

    @property
    def shards(self) -> list[Shards]:
        """The parts that are shards, whose content can be verified; none of other corpora."""
        return [part for part in (self.train, self.validation) if isinstance(part, Shards)]

    def checksum(self) -> str:
        """SHA-256, in hexadecimal digits, by which a resumed run recognises its corpus.

        It covers the tokenizer and both parts: their lengths, dtype and tokens. Of shards it takes
        the checksums in their index, of any part of more than 64 MiB 1024 evenly spaced blocks.
        With a validation part of its own, it has a checksum of each part, with a + between.
        """
        if self.validated_on is None:
            return self._checksum(self.train, self.validation)
        return "+".join(map(self._checksum, (self.train, self.validation)))

    def _checksum(self, *parts: Tokens) -> str:
        digest = hashlib.sha256(json.dumps(describe(self.tokenizer)).encode())
        for part in parts:
            digest.update(f"{len(part)} {part.dtype}\n".encode())
            for block in [part.checksum.encode()] if isinstance(part, Shards) else _samples(part):
                digest.update(block)
        return digest.hexdigest()


def load(source: str | Path | None, *, held_out: bool = True) -> Corpus:
    """Open a corpus.

    source: "topics" (Python's documentation), a text file, a directory of `ddl prepare`, or one
    with train.bin and val.bin. A text is read as bytes (vocabulary 256); its last tenth is the
    validation part. The two files have uint16 tokens of GPT-2, or of the table in meta.pkl beside
    them, and may begin with the header of llm.c. held_out: False for all of a text as the training
    part, and no need of val.bin. Raises InputError if the source is missing, incomplete,
    unreadable, empty or not UTF-8.
    """
    if source is None:
        raise InputError(
            "data",
            (
                "name a UTF-8 text file, a directory of `ddl prepare`, or one with train.bin"
                " and val.bin"
            ),
            "nothing",
        )
    if str(source) == EMBEDDED:
        text = np.frombuffer(embedded_text(), dtype=np.uint8)
        return _split("Python's documentation", text, held_out)
    path = at_home(source, argument="data")
    if is_prepared(path):
        return _load_shards(path)
    if path.is_dir():
        return _load_directory(path, held_out)
    tokens = _map(path, "a text file or a directory", np.uint8)
    if looks_wide(tokens[:HEAD].tobytes()):
        got = f"{path}, which is full of zero bytes, as UTF-16 is"
        raise InputError("data", "be UTF-8 text", got)
    _check_utf8(path, tokens)
    return _split(f"`{path}`", tokens, held_out)


def embedded_text() -> bytes:
    """The language documentation in CPython's `pydoc_data.topics`, as UTF-8.

    A fifth of its paragraphs repeat earlier ones. Repetitions are removed; otherwise the training
    part would contain some of the validation part.
    """
    try:
        from pydoc_data import topics
    except ImportError as error:
        raise InputError(
            "data", "name a text file here", "a Python without pydoc_data.topics"
        ) from error
    paragraphs = "\n\n".join(topics.topics.values()).split("\n\n")
    return "\n\n".join(dict.fromkeys(paragraphs)).encode("utf-8")


class Windows(NamedTuple):
    """Windows of a corpus.

    tokens: (B, T) int64. document_starts: (B, T) bool, True for the first token of each document;
    None if documents are not kept apart.
    """

    tokens: Tensor
    document_starts: Tensor | None

    @property
    def predicted(self) -> int:
        """The number of tokens that are scored: all but the first of a window or a document."""
        count = self.tokens[:, 1:].numel()
        begun = self.document_starts
        return count if begun is None else count - int(begun[:, 1:].sum())


def batch(
    tokens: Tokens,
    batch_size: int,
    block_size: int,
    *,
    seed: int,
    step: int,
    first: int = 0,
    documents: bool = False,
) -> Windows:
    """Cut windows `first` … `first + batch_size - 1` of a step's global batch out of `tokens`.

    A window is a function of (seed, step, its index) alone, so a resumed run and any division of
    the global batch see the same ones. documents: also return where documents start. Raises
    InputError if that is asked of tokens that do not know it.
    """
    places = batch_places(tokens, first + batch_size, block_size, seed=seed, step=step)[first:]
    return _windows(tokens, places, documents)


def batch_places(
    tokens: Tokens, batch_size: int, block_size: int, *, seed: int, step: int
) -> list[slice]:
    """Where the windows of a step's global batch lie in `tokens`, from the first one on."""
    # A bit generator's stream is the same in every version of NumPy; a distribution's may change.
    key = np.array([seed, step], dtype=np.uint64)
    numbers = np.random.Philox(key=key).random_raw(batch_size)
    uniform = (numbers >> np.uint64(11)) * 2.0**-53  # in [0, 1)
    starts = (uniform * (len(tokens) - block_size + 1)).astype(np.int64)
    return [slice(start, start + block_size) for start in starts.tolist()]


def evaluation_batches(
    tokens: Tokens,
    batch_size: int,
    block_size: int,
    count: int,
    *,
    documents: bool = False,
    share: tuple[int, int] = (0, 1),
) -> Iterator[Windows]:
    """Yield windows that do not overlap, spread evenly over `tokens`, the same on every call.

    A batch has at most `batch_size` windows. count: most batches; 0 yields every window. documents:
    as in `batch`. share: (r, n) yields the batches r, r + n, …, equally many for each r: where
    batch r is missing, one comes without tokens to predict.
    """
    places = evaluation_places(tokens, batch_size, block_size, count)
    rank, ranks = share
    for first in range(0, len(places), batch_size * ranks):
        own = places[first + rank * batch_size :][:batch_size]
        if own:
            yield _windows(tokens, own, documents)
        else:
            spare, _ = _windows(tokens, places[:1], documents=False)
            yield Windows(spare, spare >= 0)


def evaluation_places(tokens: Tokens, batch_size: int, block_size: int, count: int) -> list[slice]:
    """Where the windows of `evaluation_batches` lie in `tokens`, all shares together."""
    windows = len(tokens) // block_size
    wanted = min(windows, count * batch_size) if count else windows
    starts = ((i * windows // wanted) * block_size for i in range(wanted))
    return [slice(start, start + block_size) for start in starts]


def _windows(tokens: Tokens, places: list[slice], documents: bool) -> Windows:
    """The windows of `tokens` at these places."""
    import torch

    cut = torch.from_numpy(np.stack([uncut(tokens)[place] for place in places]).astype(np.int64))
    if not documents:
        return Windows(cut, None)
    if not isinstance(tokens, Shards):
        raise InputError(
            "data",
            (
                "be a directory of `ddl prepare`, which knows where documents start, to keep"
                " them apart"
            ),
            "another corpus",
        )
    begun = np.stack([tokens.document_starts(place) for place in places])
    return Windows(cut, torch.from_numpy(begun))


def _split(name: str, tokens: Array, held_out: bool) -> Corpus:
    cut = len(tokens) - len(tokens) // VALIDATION_SHARE * held_out
    tokenizer = ByteTokenizer()
    return Corpus(name, tokens[:cut], tokens[cut:], tokenizer, tokenizer.vocab_size - 1)


def _load_shards(path: Path) -> Corpus:
    index, train, validation, tokenizer = open_shards(path)
    if index.largest_token >= tokenizer.vocab_size:
        raise InputError(
            "data",
            f"hold tokens of its tokenizer, below {tokenizer.vocab_size}",
            f"{path} with {index.largest_token}",
        )
    return Corpus(f"`{path}`", train, validation, tokenizer, index.largest_token)


def _load_directory(path: Path, held_out: bool) -> Corpus:
    expected = "a directory with train.bin and val.bin"
    train = _without_header(path / "train.bin", expected)
    validation = train[:0]
    if held_out:
        validation = _without_header(path / "val.bin", expected)
    meta = path / "meta.pkl"
    tokenizer: Tokenizer = read_meta(meta) if meta.exists() else GPT2Tokenizer()
    largest = max(_largest(train), _largest(validation))
    return Corpus(f"`{path}`", train, validation, tokenizer, largest)


def _without_header(path: Path, expected: str) -> Array:
    """Map a file's tokens; a header of llm.c has as int32 magic, version and number of tokens."""
    tokens = _map(path, expected, np.uint16)
    head = tokens[:6].tobytes()
    if head.startswith(LLM_C):
        version, count = np.frombuffer(head.ljust(12, b"\0"), "<i4")[1:].tolist()
        tokens = tokens[HEADER:]
        if (version, count) == (1, len(tokens)):
            return tokens
        header = f"a header of llm.c, version {version}, for {count}"
        problem = f"has {len(tokens)} tokens behind {header}"
    else:
        problem = next((what for magic, what in OTHERS.items() if head.startswith(magic)), "")
        if not problem:
            return tokens
    raise InputError("data", f"be {expected} of GPT-2's tokens", f"{path}, which {problem}")


def _largest(tokens: Array) -> int:
    """The largest token, read in chunks: the file may be larger than memory."""
    chunks = (uncut(tokens)[first : first + CHUNK] for first in range(0, len(tokens), CHUNK))
    return max((int(chunk.max()) for chunk in chunks), default=-1)


def _samples(tokens: Array) -> Iterator[bytes]:
    """Yield all bytes of the tokens in blocks; of more than HASHED_WHOLE, SAMPLES spaced blocks."""
    data = tokens.view(np.uint8)
    if len(data) <= HASHED_WHOLE:
        starts = list(range(0, len(data), SAMPLE))
    else:
        starts = [i * (len(data) - SAMPLE) // (SAMPLES - 1) for i in range(SAMPLES)]
    for start in starts:
        yield uncut(data)[start : start + SAMPLE].tobytes()


def _map(path: Path, expected: str, dtype: type[np.generic]) -> Array:
    """Memory-map a file of `dtype`; raise InputError if that is impossible."""
    item = np.dtype(dtype).itemsize

    def problem_of(size: int) -> str | None:
        if size == 0:
            return "which is empty"
        odd = f"whose {size} bytes are no whole number of {item}-byte tokens"
        return odd if size % item else None

    return map_file(path, dtype, f"be {expected}", problem_of)


def _check_utf8(path: Path, tokens: Array) -> None:
    decoder = codecs.getincrementaldecoder("utf-8")()
    for start in range(0, len(tokens), CHUNK):
        chunk = uncut(tokens)[start : start + CHUNK].tobytes()
        carried = len(decoder.getstate()[0])  # bytes of a character that the last chunk split
        try:
            decoder.decode(chunk, final=start + CHUNK >= len(tokens))
        except UnicodeDecodeError as error:
            at = start - carried + error.start
            raise InputError(
                "data",
                "be UTF-8 text",
                f"{path}, whose byte {at} is {error.object[error.start]:#04x} ({error.reason})",
            ) from error
