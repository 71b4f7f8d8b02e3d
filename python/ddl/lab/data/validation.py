"""Corpora with a validation part of their own, in place of the share held out of the text."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np

from ddl.errors import InputError
from ddl.models.tokenizers import ByteTokenizer, Tokenizer, describe, lost
from ddl.paths import at_home

from .corpus import EMBEDDED, Corpus, Tokens, load
from .shards import Shards

MOST = 10  # characters that a sentence names


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
    if unknown := lost(characters, tokenizer):
        raise InputError(
            "validation",
            "have characters that the tokenizer of `data` has",
            f"{path} with {unknown[:MOST]!r}",
            ("data",),
        )
    dtype = np.uint16 if tokenizer.vocab_size <= 2**16 else np.uint32
    return np.array(tokenizer.encode(characters), dtype)
