"""Convert our tokenizers to `tokenizer.json`, which AutoTokenizer loads, and back.

A text has the tokens of `ddl train`, and nothing is added to it. But the name of a special token is
that token, as in every PreTrainedTokenizerFast; `ddl train` reads "<|endoftext|>" as words. Both
raise for a character that a character model does not know ("Missing [UNK] token"): nothing is
dropped silently.

The page docs/huggingface.md says which token is end of text, beginning of text and padding. Without
a token to spare there is none: a character of the text would end a generation too early, and
`decode(…, skip_special_tokens=True)` would drop it. tokenizer_config.json then names the token that
lm-eval may put before a text (BEFORE): the newline, or the first token.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import Regex, decoders, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import TikTokenConverter

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
    fetched.
    """
    if isinstance(tokenizer, PreTrainedTokenizerBase):
        return tokenizer
    if isinstance(tokenizer, FastTokenizer):
        return tokenizer.fast
    size = tokenizer.vocab_size if config is None else config.vocab_size
    if isinstance(tokenizer, FileTokenizer):  # whose tokenizer.json says everything else
        return _fast(*_of_file(tokenizer, size), config, None, tokenizer.chat_template)
    if isinstance(tokenizer, GPT2Tokenizer):
        backend = _byte_pairs(*_gpt2_pairs())
    elif isinstance(tokenizer, CharTokenizer):
        backend = _characters(tokenizer.table, size)
    else:
        backend = _bytes(size)
    end = None if backend.token_to_id(END) is None else END
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
    if backend.get_vocab_size() > config.vocab_size or backend.token_to_id(END) is None:
        expected = f"at most {config.vocab_size} tokens and {END} among them"
        raise InputError(
            "tokenizer", f"have {expected}", f"{backend.get_vocab_size()} from {directory}"
        )
    template = read_chat_template(directory)
    return FastTokenizer(_fast(backend, END, config, None, template))


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


def _fast(
    backend: tokenizers.Tokenizer,
    end: str | None,
    config: GPTConfig | NanoGPTConfig | None,
    description: Any,
    chat_template: Any = None,
) -> PreTrainedTokenizerFast:
    """The tokenizer with the token `end` as its end of text; None if it has none."""
    options: dict[str, Any] = {} if config is None else {"model_max_length": config.block_size}
    if description is not None:
        options[OURS] = description
    if end is None:
        newline = backend.token_to_id("\n")
        options[BEFORE] = min(backend.get_vocab().values()) if newline is None else newline
    else:
        options |= {f"{kind}_token": end for kind in ("bos", "eos", "pad")}
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        padding_side="left",  # so that generation continues at the texts' ends
        chat_template=chat_template,
        clean_up_tokenization_spaces=False,
        model_input_names=["input_ids", "attention_mask"],
        **options,
    )


def _of_file(tokenizer: FileTokenizer, size: int) -> tuple[tokenizers.Tokenizer, str | None]:
    """Copy a file's tokenizer; return it and its end of text."""
    backend = tokenizers.Tokenizer.from_str(tokenizer.backend.to_str())
    if tokenizer.document_token is not None:
        return backend, str(backend.id_to_token(tokenizer.document_token))
    known, added = backend.token_to_id(END), backend.get_added_tokens_decoder()
    if known is None and size > tokenizer.vocab_size == backend.get_vocab_size():
        backend.add_special_tokens([END])
        return backend, END
    return backend, END if known in added and added[known].special else None


def _bytes(size: int) -> tokenizers.Tokenizer:
    """Make a tokenizer in which byte b is token b."""
    alphabet = byte_alphabet()
    # No UTF-8 has the last byte, so its token has another name if the model has no further one.
    letters = alphabet if size > len(alphabet) else alphabet[:-1]
    vocabulary = {letter: byte for byte, letter in enumerate([*letters, END])}
    return _byte_pairs(vocabulary, [], words=False)


def _characters(table: Sequence[str], size: int) -> tokenizers.Tokenizer:
    """Make a tokenizer from a character table."""
    vocabulary = {character: token for token, character in enumerate(table)}
    if END not in vocabulary and size > len(table):
        vocabulary[END] = len(table)
    backend = tokenizers.Tokenizer(models.WordLevel(vocab=vocabulary))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    backend.decoder = decoders.Fuse()
    return backend


def _byte_pairs(
    vocabulary: dict[str, int], merges: list[tuple[str, str]], *, words: bool = True
) -> tokenizers.Tokenizer:
    """Make a tokenizer of byte pairs, as GPT-2's; words: over words with their leading spaces."""
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=words)
    backend.decoder = decoders.ByteLevel()
    return backend


def _gpt2_pairs() -> tuple[dict[str, int], list[tuple[str, str]]]:
    """GPT-2's vocabulary and merges, from tiktoken's ranks of byte strings."""
    encoding = gpt2_encoding()
    converter: Any = TikTokenConverter()
    converter.load_tiktoken_bpe = lambda _: {
        piece: encoding.encode_single_token(piece) for piece in encoding.token_byte_values()
    }
    vocabulary, merges = converter.extract_vocab_merges_from_model("gpt2")
    return vocabulary | {END: GPT2Tokenizer.vocab_size - 1}, merges
