"""Corpora of training tokens, and tokenizers between text and tokens."""

from .corpus import EMBEDDED, Corpus, batch, embedded_text, evaluation_batches, load
from .tokenizer import ByteTokenizer, CharTokenizer, GPT2Tokenizer, Tokenizer

__all__ = [
    "EMBEDDED",
    "ByteTokenizer",
    "CharTokenizer",
    "Corpus",
    "GPT2Tokenizer",
    "Tokenizer",
    "batch",
    "embedded_text",
    "evaluation_batches",
    "load",
]
