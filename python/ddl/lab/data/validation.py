"""Corpora with a validation part of their own, in place of the share held out of the text."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np

from ddl.errors import InputError
from ddl.models.tokenizers import ByteTokenizer, CharTokenizer, FileTokenizer, Tokenizer, describe
from ddl.paths import at_home

from .corpus import EMBEDDED, Corpus, Tokens, load
from .shards import Shards

PIECE = 2**16  # characters in which a text is searched for those that would be lost


def load_with(source: str | Path | None, validation: str | Path | None, **options: bool) -> Corpus:
    """Open a corpus, as `load` does, with the validation part that `validation` names.

    validation: a UTF-8 text, all of it, which the corpus's tokenizer encodes; or a source of
    tokens, as `load` takes them, whose own validation part is taken. None for the share that is
    held out of the corpus; otherwise all of a text is training part. documents: whether the
    documents will be kept apart. Raises InputError if a source cannot be used, the tokenizers
    differ, or the tokenizer lacks a character of the text.
    """
    if validation is None:
        return load(source)
    corpus = load(source, held_out=False)
    path = at_home(validation, argument="validation")
    prepared = path.is_dir() or str(validation) == EMBEDDED
    try:  # refused if it is missing, empty or no UTF-8
        other = load(validation) if prepared else load(path, held_out=False)
    except InputError as error:
        raise error.renamed({"data": "validation"}) from error
    if not prepared:
        tokens = _encoded(path, other.train, corpus.tokenizer)
        other = replace(other, validation=tokens, tokenizer=corpus.tokenizer)
    if describe(other.tokenizer) != describe(corpus.tokenizer):
        raise InputError(
            "validation",
            f"have the tokenizer of {corpus.name}, {corpus.tokenizer.kind} of"
            f" {corpus.tokenizer.vocab_size} tokens",
            f"{validation} with another, {other.tokenizer.kind} of {other.tokenizer.vocab_size}",
        )
    if options.get("documents") and not isinstance(other.validation, Shards):
        raise InputError(
            "validation",
            (
                "be a directory of `ddl prepare`, which knows where documents start, to keep"
                " them apart"
            ),
            validation,
        )
    largest = max(corpus.largest_token, _largest(other))
    own = other.name
    return replace(corpus, validation=other.validation, largest_token=largest, validated_on=own)


def _largest(other: Corpus) -> int:
    tokens = other.validation
    if isinstance(tokens, Shards):
        return other.largest_token
    return int(tokens.max()) if len(tokens) else -1


def _encoded(path: Path, text: Tokens, tokenizer: Tokenizer) -> Tokens:
    """The tokens of a text, of which `text` has the bytes."""
    if isinstance(tokenizer, ByteTokenizer):
        return text
    characters = text[:].tobytes().decode("utf-8")
    lost = _lost(characters, tokenizer)
    if lost:
        raise InputError(
            "validation",
            "have characters that the tokenizer of `data` has",
            f"{path} with {lost!r}",
            ("data",),
        )
    dtype = np.uint16 if tokenizer.vocab_size <= 2**16 else np.uint32
    return np.array(tokenizer.encode(characters), dtype)


def _lost(text: str, tokenizer: Tokenizer) -> str:
    """Characters of a text that the tokenizer has no token for; empty if it has one for all."""
    if isinstance(tokenizer, CharTokenizer):
        return "".join(sorted(set(text) - set(tokenizer.table)))[:10]
    if isinstance(tokenizer, FileTokenizer):
        pieces = (text[start : start + PIECE] for start in range(0, len(text), PIECE))
        return next((lost[:10] for lost in map(tokenizer.dropped, pieces) if lost), "")
    return ""
