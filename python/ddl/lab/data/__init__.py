"""Corpora of training tokens, and tokenizers between text and tokens."""

from ddl.models.tokenizers import (
    ByteTokenizer,
    CharTokenizer,
    FileTokenizer,
    GPT2Tokenizer,
    Tokenizer,
)

from .corpus import EMBEDDED, Corpus, Windows, batch, embedded_text, evaluation_batches, load
from .shards import Shards
from .validation import load_with

__all__ = [
    "EMBEDDED",
    "ByteTokenizer",
    "CharTokenizer",
    "Corpus",
    "FileTokenizer",
    "GPT2Tokenizer",
    "Shards",
    "Tokenizer",
    "Windows",
    "batch",
    "embedded_text",
    "evaluation_batches",
    "load",
    "load_with",
]
