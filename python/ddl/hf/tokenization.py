"""Convert our tokenizers to `tokenizer.json`, which AutoTokenizer loads, and back.

Both give equal tokens. No special token is added to a text or recognised in it, so the words
"<|endoftext|>" in a text are just words. Both raise for a character that a character model does not
know ("Missing [UNK] token"): nothing is dropped silently.

One token serves as end of text, beginning of text and padding, which lm-eval and batches need:

    GPT-2             <|endoftext|>, 50256
    tokenizer.json    the token that `ddl prepare` put before each document. If it put none: as for
                      bytes, with token 0 in place of byte 0
    bytes, characters <|endoftext|>, the first token that no text needs, if the model has one: its
                      vocabulary is larger than 256 bytes or len(table) characters. Else
                      byte 0, which texts do not contain, or the newline (the first character of a
                      table without one), which `decode(…, skip_special_tokens=True)` then drops.

Byte and character models, and those of a tokenizer.json without such a token, never saw it between
texts in training, so `generate` does not stop at it unless told to.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import Regex, decoders, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from ddl.errors import InputError, first_line
from ddl.models import NanoGPTConfig
from ddl.models.config import GPTConfig
from ddl.models.tokenizers import (
    END_OF_TEXT,
    CharTokenizer,
    FileTokenizer,
    GPT2Tokenizer,
    Tokenizer,
    _gpt2,
    byte_alphabet,
    describe,
    restore,
)

__all__ = ["FastTokenizer", "from_files", "load_tokenizer", "to_fast"]

END = END_OF_TEXT
OURS = "ddl_tokenizer"  # the entry of tokenizer_config.json with our tokenizer's description
FILES = ("tokenizer.json", "vocab.json", "merges.txt")


class FastTokenizer:
    """A Hugging Face tokenizer with the interface of ours."""

    kind = "fast"

    def __init__(self, fast: Any) -> None:
        self.fast = fast
        self.vocab_size = len(fast)

    def encode(self, text: str) -> list[int]:
        return list(self.fast(text, add_special_tokens=False)["input_ids"])

    def decode(self, tokens: Sequence[int]) -> str:
        """Decode tokens; unknown ones are dropped."""
        return str(self.fast.decode(list(tokens)))


def to_fast(
    tokenizer: Tokenizer, config: GPTConfig | NanoGPTConfig | None = None
) -> PreTrainedTokenizerFast:
    """Convert to the Hugging Face tokenizer that `ddl.hf.save` writes.

    config: the model's, for its block_size and its size of vocabulary. Raises InputError if GPT-2's
    byte pairs cannot be fetched or a character cannot be written as UTF-8.
    """
    if isinstance(tokenizer, FastTokenizer):
        return tokenizer.fast
    size = tokenizer.vocab_size if config is None else config.vocab_size
    if isinstance(tokenizer, GPT2Tokenizer):
        backend, end = _byte_pairs(*_gpt2_pairs()), END
    elif isinstance(tokenizer, FileTokenizer):
        return _fast(*_of_file(tokenizer, size), config, None)  # tokenizer.json says everything
    elif isinstance(tokenizer, CharTokenizer):
        backend, end = _characters(tokenizer.table, size)
    else:
        backend, end = _bytes(size)
    return _fast(backend, end, config, describe(tokenizer))


def from_files(directory: Path, config: GPTConfig | NanoGPTConfig) -> FastTokenizer:
    """Load GPT-2's tokenizer from its files: tokenizer.json, or vocab.json with merges.txt.

    Raises InputError if they are missing, unreadable or do not fit the model.
    """
    whole, vocab, merges = (directory / name for name in FILES)
    try:
        if whole.exists():
            backend = tokenizers.Tokenizer.from_file(str(whole))
        else:
            backend = _byte_pairs(*models.BPE.read_file(str(vocab), str(merges)))
    except Exception as error:  # tokenizers raises plain Exceptions
        raise InputError(
            f"`tokenizer` must be a directory with {FILES[0]}, or {FILES[1]} and {FILES[2]}, got "
            f"{directory}: {first_line(error)}"
        ) from error
    if not isinstance(backend.model, models.BPE):
        kind = type(backend.model).__name__
        raise InputError(f"`tokenizer` must have byte pairs, got a {kind} from {directory}")
    if backend.get_vocab_size() > config.vocab_size or backend.token_to_id(END) is None:
        expected = f"at most {config.vocab_size} tokens and {END} among them"
        raise InputError(
            f"`tokenizer` must have {expected}, got {backend.get_vocab_size()} from {directory}"
        )
    return FastTokenizer(_fast(backend, END, config, None))


def load_tokenizer(directory: Path) -> Tokenizer | None:
    """Load the tokenizer of a Hugging Face directory; None if there is none."""
    if not (directory / FILES[0]).exists():
        return None
    # Neither run nor offer to run code in the directory.
    here: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
    fast = AutoTokenizer.from_pretrained(directory, **here)
    description = fast.init_kwargs.get(OURS)
    if description is None:
        return FastTokenizer(fast)
    tokenizer = restore(description)
    # `fast` has GPT-2's data, which GPT2Tokenizer would have to fetch.
    return FastTokenizer(fast) if isinstance(tokenizer, GPT2Tokenizer) else tokenizer


def _fast(
    backend: tokenizers.Tokenizer,
    end: str,
    config: GPTConfig | NanoGPTConfig | None,
    description: Any,
) -> PreTrainedTokenizerFast:
    options: dict[str, Any] = {} if config is None else {"model_max_length": config.block_size}
    spelled = all(backend.token_to_id(character) is not None for character in end)
    if description is not None:
        options[OURS] = description
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token=end,
        eos_token=end,
        pad_token=end,
        padding_side="left",  # so that generation continues at the texts' ends
        # Encode special tokens in a text as plain text, unless a character table cannot spell them:
        # lm-eval encodes the end of text as a stop string.
        split_special_tokens=not isinstance(backend.model, models.WordLevel) or spelled,
        clean_up_tokenization_spaces=False,
        model_input_names=["input_ids", "attention_mask"],
        **options,
    )


def _of_file(tokenizer: FileTokenizer, size: int) -> tuple[tokenizers.Tokenizer, str]:
    """Copy a file's tokenizer; return it and the end of text."""
    backend = tokenizers.Tokenizer.from_str(tokenizer.backend.to_str())
    token = tokenizer.document_token
    if token is not None:
        return backend, str(backend.id_to_token(token))
    if backend.token_to_id(END) is None:
        numbers = backend.get_vocab().values()
        if not size > tokenizer.vocab_size == len(numbers):
            return backend, str(backend.id_to_token(min(numbers)))
        backend.add_special_tokens([END])
    return backend, END


def _bytes(size: int) -> tuple[tokenizers.Tokenizer, str]:
    """Make a tokenizer in which byte b is token b; return it and the end of text."""
    alphabet = byte_alphabet()
    vocabulary = {letter: byte for byte, letter in enumerate(alphabet)}
    end = alphabet[0]
    if size > len(alphabet):
        end, vocabulary[END] = END, len(alphabet)
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    return backend, end


def _characters(table: Sequence[str], size: int) -> tuple[tokenizers.Tokenizer, str]:
    """Make a tokenizer from a character table; return it and the end of text."""
    lone = next((c for c in table if c != c.encode("utf-8", "replace").decode("utf-8")), None)
    if lone is not None:  # a lone surrogate
        raise InputError(f"`tokenizer` must have characters that UTF-8 spells, got {lone!r}")
    vocabulary = {character: token for token, character in enumerate(table)}
    end = "\n" if "\n" in vocabulary else table[0]
    if size > len(table):
        end, vocabulary[END] = END, len(table)
    backend = tokenizers.Tokenizer(models.WordLevel(vocab=vocabulary))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    backend.decoder = decoders.Fuse()
    return backend, end


def _byte_pairs(vocabulary: dict[str, int], merges: list[tuple[str, str]]) -> tokenizers.Tokenizer:
    """Make GPT-2's tokenizer: byte pairs over words with their leading spaces."""
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    backend.decoder = decoders.ByteLevel()
    return backend


def _gpt2_pairs() -> tuple[dict[str, int], list[tuple[str, str]]]:
    """Reconstruct GPT-2's vocabulary and merges from tiktoken's ranks of byte strings."""
    encoding = _gpt2()
    ranks = {piece: encoding.encode_single_token(piece) for piece in encoding.token_byte_values()}
    alphabet = byte_alphabet()
    spelled = {piece: "".join(alphabet[byte] for byte in piece) for piece in ranks}
    merges = []
    for piece in sorted(ranks, key=ranks.__getitem__):
        if len(piece) > 1:
            first, second = _halves(piece, ranks)
            merges.append((spelled[first], spelled[second]))
    vocabulary = {spelled[piece]: rank for piece, rank in ranks.items()}
    return vocabulary | {END: GPT2Tokenizer.vocab_size - 1}, merges


def _halves(piece: bytes, ranks: dict[bytes, int]) -> list[bytes]:
    """The two tokens that merge into `piece`: the parts left after all earlier merges."""
    parts = [piece[i : i + 1] for i in range(len(piece))]
    while len(parts) > 2:
        pairs = [ranks.get(a + b, len(ranks)) for a, b in pairwise(parts)]
        at = pairs.index(min(pairs))
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    return parts
