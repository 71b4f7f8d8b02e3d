"""Convert our tokenizers to `tokenizer.json`, which AutoTokenizer loads, and back.

A text has the tokens of `ddl train`, and nothing is added to it. But the name of a special token is
that token, as in every PreTrainedTokenizerFast; `ddl train` reads "<|endoftext|>" as words. Both
raise for a character that a character model does not know ("Missing [UNK] token"): nothing is
dropped silently.

One token that no text has serves as end of text, beginning of text and padding, which lm-eval and
batches need:

    GPT-2             <|endoftext|>, 50256
    tokenizer.json    the token that `ddl prepare` put before each document; else a special token
                      <|endoftext|>, which is added if the model's vocabulary is larger
    bytes             <|endoftext|>: token 256 if the model has one, else 255, which UTF-8 lacks
    characters        <|endoftext|>, if the model's vocabulary is larger than the table

Otherwise there is no end of text: a character of the text would end a generation too early, and
`decode(…, skip_special_tokens=True)` would drop it. tokenizer_config.json then names the token that
lm-eval may put before a text (BEFORE): the newline, or token 0.

Byte and character models, and those of a tokenizer.json without such a token, never saw it between
texts in training, so `generate` stops at it only if `eos_token_id` names it.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import tokenizers
from tokenizers import Regex, decoders, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from ddl.errors import InputError, first_line
from ddl.models import NanoGPTConfig
from ddl.models.config import GPTConfig
from ddl.models.tokenizers import (
    END_OF_TEXT,
    CharTokenizer,
    FileTokenizer,
    GPT2Tokenizer,
    Tokenizer,
    byte_alphabet,
    describe,
    gpt2_encoding,
    read_chat_template,
    restore,
)

__all__ = ["FastTokenizer", "from_files", "load_tokenizer", "to_fast"]

END = END_OF_TEXT
OURS = "ddl_tokenizer"  # the entry of tokenizer_config.json with our tokenizer's description
BEFORE = "ddl_before_text"  # the entry with the token before a text, if it is not the end of text
FILES = ("tokenizer.json", "vocab.json", "merges.txt")


class FastTokenizer:
    """A Hugging Face tokenizer with the interface of ours: its tokens are those of `fast(text)`.

    ours: the tokenizer of bytes or characters that `fast` was made from, if it was. words: encode
    the names of special tokens as words, and add no token to a text.
    """

    kind = "fast"

    def __init__(self, fast: Any, ours: Tokenizer | None = None, *, words: bool = False) -> None:
        self.fast, self.ours, self.words = fast, ours, words
        self.vocab_size = 1 + max(fast.get_vocab().values(), default=-1)

    @property
    def of_training(self) -> Tokenizer:
        """The tokenizer as `ddl train` reads a text."""
        return self.ours or FastTokenizer(self.fast, words=True)

    def encode(self, text: str) -> list[int]:
        """Encode a text; raise InputError for a character that a character model does not know."""
        options = {"add_special_tokens": False, "split_special_tokens": True} if self.words else {}
        try:
            return list(self.fast(text, **options)["input_ids"])
        except Exception:  # tokenizers raises plain Exceptions
            if self.ours is not None:
                for name in self.fast.get_added_vocab():
                    text = text.replace(name, "")
                self.ours.encode(text)  # which names the character
            raise

    def decode(self, tokens: Sequence[int]) -> str:
        """Decode tokens; unknown ones are dropped."""
        return str(self.fast.decode(list(tokens)))


def to_fast(
    tokenizer: Tokenizer | PreTrainedTokenizerBase,
    config: GPTConfig | NanoGPTConfig | None = None,
) -> PreTrainedTokenizerBase:
    """Convert to the Hugging Face tokenizer that `ddl.hf.save` writes.

    tokenizer: one of ours, or Hugging Face's, which is returned as it is. config: the model's, for
    its block_size and its size of vocabulary. Raises InputError if GPT-2's byte pairs cannot be
    fetched or a character cannot be written as UTF-8.
    """
    if isinstance(tokenizer, PreTrainedTokenizerBase):
        return tokenizer
    if isinstance(tokenizer, FastTokenizer):
        return tokenizer.fast
    size = tokenizer.vocab_size if config is None else config.vocab_size
    if isinstance(tokenizer, GPT2Tokenizer):
        backend, end = _byte_pairs(*_gpt2_pairs()), _End(END)
    elif isinstance(tokenizer, FileTokenizer):
        # tokenizer.json says everything else
        return _fast(*_of_file(tokenizer, size), config, None, tokenizer.chat_template)
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
            "tokenizer",
            f"be a directory with {FILES[0]}, or {FILES[1]} and {FILES[2]}",
            f"{directory}: {first_line(error)}",
        ) from error
    if not isinstance(backend.model, models.BPE):
        kind = type(backend.model).__name__
        raise InputError("tokenizer", "have byte pairs", f"a {kind} from {directory}")
    if backend.get_vocab_size() > config.vocab_size or backend.token_to_id(END) is None:
        expected = f"at most {config.vocab_size} tokens and {END} among them"
        raise InputError(
            "tokenizer", f"have {expected}", f"{backend.get_vocab_size()} from {directory}"
        )
    template = read_chat_template(directory)
    return FastTokenizer(_fast(backend, _End(END), config, None, template))


def load_tokenizer(directory: Path) -> FastTokenizer | None:
    """Load the tokenizer of a Hugging Face directory; None if there is none."""
    if not (directory / FILES[0]).exists():
        return None
    # Neither run nor offer to run code in the directory.
    here: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
    fast = AutoTokenizer.from_pretrained(directory, **here)
    fast("")  # which fails if its config has values of other types
    description = fast.init_kwargs.get(OURS)
    ours = None if description is None else restore(description)
    # `fast` has GPT-2's data, which GPT2Tokenizer would have to fetch.
    return FastTokenizer(fast, None if isinstance(ours, GPT2Tokenizer) else ours)


class _End(NamedTuple):
    """The name of the end of text; None if there is none. Then `before` may precede a text."""

    name: str | None
    before: int | None = None


def _fast(
    backend: tokenizers.Tokenizer,
    end: _End,
    config: GPTConfig | NanoGPTConfig | None,
    description: Any,
    chat_template: Any = None,
) -> PreTrainedTokenizerFast:
    options: dict[str, Any] = {} if config is None else {"model_max_length": config.block_size}
    if description is not None:
        options[OURS] = description
    if end.before is not None:
        options[BEFORE] = end.before
    if end.name is not None:
        options |= {f"{kind}_token": end.name for kind in ("bos", "eos", "pad")}
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        padding_side="left",  # so that generation continues at the texts' ends
        chat_template=chat_template,
        clean_up_tokenization_spaces=False,
        model_input_names=["input_ids", "attention_mask"],
        **options,
    )


def _of_file(tokenizer: FileTokenizer, size: int) -> tuple[tokenizers.Tokenizer, _End]:
    """Copy a file's tokenizer; return it and the end of text."""
    backend = tokenizers.Tokenizer.from_str(tokenizer.backend.to_str())
    if tokenizer.document_token is not None:
        return backend, _End(str(backend.id_to_token(tokenizer.document_token)))
    known, numbers = backend.token_to_id(END), backend.get_vocab().values()
    added = backend.get_added_tokens_decoder()
    if known in added and added[known].special:
        return backend, _End(END)
    if known is None and size > tokenizer.vocab_size == len(numbers):
        backend.add_special_tokens([END])
        return backend, _End(END)
    return backend, _End(None, before=min(numbers))


def _bytes(size: int) -> tuple[tokenizers.Tokenizer, _End]:
    """Make a tokenizer in which byte b is token b; return it and the end of text."""
    alphabet = byte_alphabet()
    # No UTF-8 has the last byte, so its token has another name if the model has no further one.
    letters = alphabet if size > len(alphabet) else alphabet[:-1]
    vocabulary = {letter: byte for byte, letter in enumerate([*letters, END])}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    return backend, _End(END)


def _characters(table: Sequence[str], size: int) -> tuple[tokenizers.Tokenizer, _End]:
    """Make a tokenizer from a character table; return it and the end of text."""
    lone = next((c for c in table if c != c.encode("utf-8", "replace").decode("utf-8")), None)
    if lone is not None:  # a lone surrogate
        raise InputError("tokenizer", "have characters that UTF-8 spells", repr(lone))
    vocabulary = {character: token for token, character in enumerate(table)}
    if END not in vocabulary and size > len(table):
        vocabulary[END] = len(table)
    end = _End(END) if END in vocabulary else _End(None, before=vocabulary.get("\n", 0))
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
    encoding = gpt2_encoding()
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
