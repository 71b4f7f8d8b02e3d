"""A prompt is encoded whole or refused."""

from __future__ import annotations

import json
import re

import pytest

from ddl.errors import InputError
from ddl.models.tokenizers import ByteTokenizer, FileTokenizer, encode_prompt


def words(unknown: str | None) -> FileTokenizer:
    """A tokenizer of the words `to` and `be`, split at white space."""
    vocab = {"to": 0, "be": 1, "<unk>": 2}
    model = {"type": "BPE", "vocab": vocab | {c: 3 + i for i, c in enumerate("tobe")}}
    model |= {"merges": [["t", "o"], ["b", "e"]], "unk_token": unknown}
    return FileTokenizer(json.dumps({"model": model, "pre_tokenizer": {"type": "Whitespace"}}))


def test_what_has_tokens_is_encoded() -> None:
    assert encode_prompt(" to be\n", words(None)) == [0, 1]
    assert encode_prompt("to ¿be", words("<unk>")) == [0, 2, 1]
    assert encode_prompt("é", ByteTokenizer()) == [0xC3, 0xA9]


@pytest.mark.parametrize(
    ("prompt", "sentence"),
    [
        ("to ¿be?", "have characters that the tokenizer has tokens for, got '¿?'"),
        ("日本", "have characters that the tokenizer has tokens for, got '日本'"),
        (" \n", "have at least one token, got ' \\n'"),
        ("\ud800", "be UTF-8 text, got '\\ud800'"),
    ],
)
def test_what_would_be_lost_is_refused(prompt: str, sentence: str) -> None:
    with pytest.raises(InputError, match=re.escape(f"`prompt` must {sentence}") + "$"):
        encode_prompt(prompt, words(None))
