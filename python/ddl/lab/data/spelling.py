"""Bytes of the text that tokens spell, for bits per byte.

A token counts with what its decoding adds to a text, so one that holds half a character counts half
of its bytes. Markers, which no text has, count nothing.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import islice
from typing import Any

import numpy as np
import numpy.typing as npt

from ddl.errors import InputError
from ddl.models.tokenizers import (
    END_OF_TEXT,
    ByteTokenizer,
    CharTokenizer,
    FileTokenizer,
    GPT2Tokenizer,
    Tokenizer,
    byte_alphabet,
)

from .corpus import Tokens
from .shards import Shards, uncut

BYTE = re.compile(r"<0x[0-9A-Fa-f]{2}>")  # a token of SentencePiece's byte fallback

AT_ONCE = 64  # windows

Lengths = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Spelling:
    """Bytes of UTF-8 that tokens stand for.

    lengths: bytes of each token, with zeros behind the vocabulary, up to the largest token of two
    bytes or more. marker: the token before each document, which is no text there; None for none.
    added: bytes, of a space, that the tokenizer puts before a text. are_bytes: whether every token
    is one, so that none has to be read.
    """

    lengths: Lengths
    marker: int | None = None
    added: int = 0
    are_bytes: bool = False

    def bytes_per_token(self, tokens: Tokens, windows: Iterable[slice], *, apart: bool) -> float:
        """Bytes per predicted token of these windows, in each of which the first is not predicted.

        apart: nor is the first token of a document, because documents are kept apart.
        """
        if self.are_bytes:
            return 1.0
        spelled = predicted = 0
        remaining = iter(windows)
        while group := list(islice(remaining, AT_ONCE)):
            lengths, scored = self._count(tokens, group, apart)
            spelled += int(lengths.sum(where=scored))
            predicted += int(scored.sum())
        return spelled / max(predicted, 1)

    @cached_property
    def _depends_on_starts(self) -> bool:
        """Whether a token may count other bytes where a document starts."""
        return self.added > 0 or (self.marker is not None and self.lengths[self.marker] > 0)

    def _count(
        self, tokens: Tokens, windows: Sequence[slice], apart: bool
    ) -> tuple[Lengths, npt.NDArray[np.bool_]]:
        """The bytes of each token of windows of one length, and whether it is predicted."""
        cut = np.stack([uncut(tokens)[window] for window in windows])
        if cut.dtype.itemsize > 2:
            cut = np.minimum(cut, np.int64(len(self.lengths) - 1))
        lengths = self.lengths[cut]
        scored = np.ones(cut.shape, np.bool_)
        scored[:, 0] = False
        if isinstance(tokens, Shards) and (apart or self._depends_on_starts):
            begun = np.stack([tokens.document_starts(window) for window in windows])
            first = begun
            if self.marker is not None:
                lengths[begun & (cut == self.marker)] = 0
                first = np.zeros_like(begun)
                first[:, 1:] = begun[:, :-1]
            lengths[first] = np.maximum(lengths[first] - self.added, 0)
            if apart:
                scored &= ~begun
        return lengths, scored


def spelling(tokenizer: Tokenizer) -> Spelling | None:
    """How a tokenizer's tokens spell text; None if that cannot be known.

    It cannot if GPT-2's byte pairs are not there, or a tokenizer.json does not say how to join its
    tokens, or has a token that spells one text as an added token and another as the model's.
    """
    if isinstance(tokenizer, ByteTokenizer):
        return replace(_spelling([1] * tokenizer.vocab_size), are_bytes=True)
    if isinstance(tokenizer, CharTokenizer):
        return _spelling(0 if c == END_OF_TEXT else _size(c) for c in tokenizer.table)
    if isinstance(tokenizer, FileTokenizer):
        return _of_file(tokenizer)
    if not isinstance(tokenizer, GPT2Tokenizer):
        return None
    try:
        return _spelling(tokenizer.byte_lengths())
    except InputError:
        return None


def _spelling(lengths: Iterable[int], marker: int | None = None, added: int = 0) -> Spelling:
    known = np.array([*lengths, 0], np.int64)
    return Spelling(np.pad(known, (0, max(0, 2**16 - len(known)))), marker, added)


def _size(text: str) -> int:
    return len(text.encode("utf-8", "surrogatepass"))


# --- a tokenizer.json -----------------------------------------------------------------------------


def _of_file(tokenizer: FileTokenizer) -> Spelling | None:
    content, backend = json.loads(tokenizer.text), tokenizer.backend
    names = {token: name for name, token in backend.get_vocab().items()}
    added = backend.get_added_tokens_decoder()
    special = {token for token, entry in added.items() if entry.special}
    of_model = special & set(backend.get_vocab(with_added_tokens=False).values())
    spelled = {token for token in of_model if _is_text(token, tokenizer)}
    markers = (special - spelled) | {_unknown(content["model"], backend)}
    ordinary = {token: name for token, name in sorted(names.items()) if token not in markers}
    decoders = _kinds(content.get("decoder"))
    if not decoders and _joins_within_words(tokenizer, ordinary):
        return None
    if "ByteLevel" in decoders:
        alphabet = set(byte_alphabet())
        found = {t: len(n) if alphabet.issuperset(n) else _size(n) for t, n in ordinary.items()}
    else:
        found = _by_decoding(backend, ordinary)
    if "ByteFallback" in decoders:
        found |= {token: 1 for token, name in names.items() if BYTE.fullmatch(name)}
    texts = {t: _size(name) for t, name in ordinary.items() if t in added.keys() - special}
    twice = texts.keys() & backend.get_vocab(with_added_tokens=False).values()
    if "ByteLevel" in decoders and any(texts[token] != found[token] for token in twice):
        return None
    if decoders and "WordPiece" not in decoders:  # which puts a space before an added token
        found |= {token: size for token, size in texts.items() if token not in twice}
    lengths = [found.get(token, 0) for token in range(tokenizer.vocab_size)]
    before = _before_a_text(tokenizer, ordinary, lengths)
    return _spelling(lengths, tokenizer.document_token, before)


def _is_text(token: int, tokenizer: FileTokenizer) -> bool:
    """Whether texts have a special token of the model's vocabulary, such as that of a byte."""
    try:
        return token in tokenizer.encode(tokenizer.decode([token]))
    except InputError:  # characters that the vocabulary lacks
        return False


def _unknown(model: dict[str, Any], backend: Any) -> int | None:
    """The token of what the vocabulary cannot spell; None if there is none."""
    if model.get("unk_id") is not None:
        return int(model["unk_id"])
    name = model.get("unk_token")
    token: int | None = None if name is None else backend.token_to_id(name)
    return token


def _kinds(decoder: dict[str, Any] | None) -> set[str]:
    """The types of a decoder, and of those that it consists of."""
    if decoder is None:
        return set()
    parts = decoder.get("decoders", [])
    return {decoder["type"]}.union(*(_kinds(part) for part in parts))


def _joins_within_words(tokenizer: FileTokenizer, ordinary: dict[int, str]) -> bool:
    """Whether a word may have several tokens, between which a missing decoder puts spaces."""
    letters = [name for name in ordinary.values() if len(name) == 1 and name.isalpha()][:5]
    try:
        return any(len(tokenizer.encode(a + b)) > 1 for a in letters for b in letters)
    except InputError:  # a word that the vocabulary lacks
        return False


def _by_decoding(backend: Any, ordinary: dict[int, str]) -> dict[int, int]:
    """The bytes that each token adds between two words."""
    words = _words(backend, ordinary)[:2]
    if len(words) < 2:
        return {}
    (before, _), (behind, _) = words
    between = [[before, token, behind] for token in ordinary]
    texts = backend.decode_batch([[before, behind], *between], skip_special_tokens=False)
    alone, *sizes = map(_size, texts)
    return {t: max(0, size - alone) for t, size in zip(ordinary, sizes, strict=True)}


def _before_a_text(
    tokenizer: FileTokenizer, ordinary: dict[int, str], lengths: Sequence[int]
) -> int:
    """Bytes more that the tokens of a text have than the text: a space that was put before it."""
    for _, word in _words(tokenizer.backend, ordinary)[:1]:
        spelled = sum(lengths[token] for token in tokenizer.encode(word))
        return max(0, spelled - _size(word))
    return 0


def _words(backend: Any, ordinary: dict[int, str]) -> list[tuple[int, str]]:
    """Tokens that are letters, and the text of each alone."""
    texts = backend.decode_batch([[token] for token in ordinary], skip_special_tokens=False)
    found = ((token, text.strip()) for token, text in zip(ordinary, texts, strict=True))
    return [(token, text) for token, text in found if text.isascii() and text.isalpha()]
