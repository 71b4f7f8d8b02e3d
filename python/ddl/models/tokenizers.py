"""Tokenizers: bytes, nanoGPT's characters, GPT-2's byte pairs, a Hugging Face tokenizer.json."""

from __future__ import annotations

import io
import json
import pickle
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol
from unicodedata import category

from ddl.errors import InputError, first_line

END_OF_TEXT = "<|endoftext|>"
PIECE = 2**16  # characters in which a text is searched for those that would be lost


class Tokenizer(Protocol):
    """Interface of a tokenizer. A run directory stores what `describe` says of it."""

    kind: str
    vocab_size: int

    def encode(self, text: str) -> list[int]: ...

    def decode(self, tokens: Sequence[int]) -> str: ...


class ByteTokenizer:
    """A token is a byte of the UTF-8 text."""

    kind = "bytes"
    vocab_size = 256

    def encode(self, text: str) -> list[int]:
        return list(text.encode("utf-8"))

    def decode(self, tokens: Sequence[int]) -> str:
        """Decode as UTF-8; invalid bytes and tokens above 255 become replacement characters."""
        # 0xFF never occurs in UTF-8, so it decodes to the replacement character.
        return bytes(t if 0 <= t < 256 else 0xFF for t in tokens).decode("utf-8", errors="replace")


class CharTokenizer:
    """A token is a character of a table, as in nanoGPT's shakespeare_char."""

    kind = "characters"

    def __init__(self, table: Sequence[str]) -> None:
        self.table = list(table)
        self.vocab_size = len(self.table)
        self._token = {character: token for token, character in enumerate(self.table)}

    def encode(self, text: str) -> list[int]:
        """Encode each character by its index in the table; raise InputError if one is missing."""
        unknown = next((c for c in text if c not in self._token), None)
        if unknown is not None:
            expected = f"consist of the {self.vocab_size} characters that the model was trained on"
            raise InputError("text", expected, repr(unknown))
        return [self._token[c] for c in text]

    def decode(self, tokens: Sequence[int]) -> str:
        """Decode tokens by the table; others become the replacement character."""
        return "".join(self.table[t] if 0 <= t < self.vocab_size else "\ufffd" for t in tokens)


class GPT2Tokenizer:
    """GPT-2's byte pairs, by the optional package tiktoken, which downloads them once."""

    kind = "gpt2"
    vocab_size = 50257
    padded_size = 50304
    """The largest vocabulary of a model that is taken for this one with padding."""

    def encode(self, text: str) -> list[int]:
        return list(gpt2_encoding().encode_ordinary(text))

    def decode(self, tokens: Sequence[int]) -> str:
        """Decode byte pairs; padding tokens from 50257 on become the replacement character."""
        piece = gpt2_encoding().decode_single_token_bytes
        pieces = [piece(t) if 0 <= t < self.vocab_size else b"\xff" for t in tokens]
        return b"".join(pieces).decode("utf-8", errors="replace")

    def byte_lengths(self) -> list[int]:
        """The bytes of each token; 0 for the last one, which marks the end of a text."""
        piece = gpt2_encoding().decode_single_token_bytes
        return [*(len(piece(token)) for token in range(self.vocab_size - 1)), 0]


def gpt2_encoding() -> Any:
    try:
        import tiktoken
    except ModuleNotFoundError as error:
        raise InputError.sentence(
            "GPT-2 tokens need the package tiktoken to be read as text: pip install tiktoken"
        ) from error
    try:
        return tiktoken.get_encoding("gpt2")
    except Exception as error:  # requests' exceptions; requests is not a dependency here
        raise InputError.sentence(f"tiktoken could not load GPT-2's byte pairs: {error}") from error


class FileTokenizer:
    """A tokenizer.json of Hugging Face, by the package tokenizers.

    No special token is added to a text or recognised in it. Settings of the file that would lose
    tokens or draw them at random (truncation, padding, dropout) have no effect.

    text: the file's content. document_token: the token before each document of the training data;
    None if there is none. chat_template: as `read_chat_template` returns it, for the export. Raises
    InputError if the package cannot read the text, or the vocabulary has no such token.
    """

    kind = "file"

    def __init__(
        self, text: str, document_token: int | None = None, chat_template: Any = None
    ) -> None:
        from tokenizers import Tokenizer as Backend

        try:
            content = json.loads(text)
            content |= {"truncation": None, "padding": None, "post_processor": None}
            content["model"] |= {"dropout": None} if "dropout" in content["model"] else {}
            backend = Backend.from_str(json.dumps(content))
        except Exception as error:  # tokenizers raises plain Exceptions
            got = f"{type(error).__name__}: {first_line(error)}"
            expected = "be a tokenizer.json that the package tokenizers reads"
            raise InputError("tokenizer", expected, got) from error
        vocabulary = set(backend.get_vocab().values())
        known = type(document_token) is int and document_token in vocabulary
        if document_token is not None and not known:
            expected = "be a token of the tokenizer's vocabulary"
            raise InputError("document_token", expected, repr(document_token))
        backend.encode_special_tokens = True  # encode special tokens in a text as plain text
        self.text, self.document_token, self.backend = text, document_token, backend
        self.chat_template = chat_template
        self.vocab_size = 1 + max(vocabulary, default=-1)

    def encode(self, text: str) -> list[int]:
        """Encode a text; raise InputError if the vocabulary cannot spell it."""
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: list[str]) -> list[list[int]]:
        """Encode texts, on as many threads as TOKENIZERS_PARALLELISM allows."""
        try:
            encodings = self.backend.encode_batch_fast(texts, add_special_tokens=False)
        except Exception as error:  # tokenizers raises plain Exceptions
            raise InputError("tokenizer", "encode every text", first_line(error)) from error
        return [encoding.ids for encoding in encodings]

    def decode(self, tokens: Sequence[int]) -> str:
        """Decode tokens; unknown ones are dropped."""
        return str(self.backend.decode(list(tokens), skip_special_tokens=False))

    def dropped(self, text: str) -> str:
        """The characters of a text, but for white space, of which no token is left."""
        kept = {i for a, b in self.backend.encode(text).offsets for i in range(a, b)}
        lost = "".join(c for i, c in enumerate(text) if i not in kept and not c.isspace())
        # Behind a character without a token, offsets may be those of other characters.
        named = [c for c in dict.fromkeys(text if lost else "") if not c.isspace()]
        return "".join(c for c in named if not self.encode(c)) or lost


def read_chat_template(directory: Path) -> Any:
    """The chat template of a directory with a Hugging Face tokenizer, as transformers stores it: a
    text, named texts, or None if there is none.

    Raises InputError if a file cannot be read.
    """
    path = directory / "tokenizer_config.json"
    named = {
        file.stem: file for file in sorted(directory.glob("additional_chat_templates/*.jinja"))
    }
    if (directory / "chat_template.jinja").is_file():
        named = {"default": directory / "chat_template.jinja"} | named
    try:
        if named:
            texts = {name: (path := file).read_text("utf-8") for name, file in named.items()}
            return texts["default"] if list(texts) == ["default"] else texts
        return json.loads(path.read_text("utf-8")).get("chat_template") if path.is_file() else None
    except (OSError, ValueError, AttributeError, RecursionError) as error:
        got = f"{path}: {first_line(error)}"
        raise InputError("tokenizer", "have a readable chat template", got) from error


def training_tokenizer(tokenizer: Any) -> Any:
    """The tokenizer as `ddl train` reads a text: words like <|endoftext|> are words, even if
    `tokenizer` is that of a Hugging Face directory, where they are tokens."""
    return getattr(tokenizer, "of_training", tokenizer)


def byte_alphabet() -> list[str]:
    """The character for each byte in a byte-level tokenizer.json.

    Printable Latin-1 bytes stand for themselves; the others are numbered from U+0100.
    """
    printed = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printed]
    return [chr(byte if byte in printed else 256 + others.index(byte)) for byte in range(256)]


def lost(text: str, tokenizer: Tokenizer) -> str:
    """Characters of a text that the tokenizer has no token for, in its order; empty if it has all.

    Of a tokenizer.json those of the first piece that has any, without white space.
    """
    if isinstance(tokenizer, CharTokenizer):
        known = set(tokenizer.table)
        return "".join(c for c in dict.fromkeys(text) if c not in known)
    if isinstance(tokenizer, FileTokenizer):
        pieces = (text[start : start + PIECE] for start in range(0, len(text), PIECE))
        return next(filter(None, map(tokenizer.dropped, pieces)), "")
    return ""


def encode_prompt(prompt: str, tokenizer: Tokenizer) -> list[int]:
    """Encode a prompt. Raises InputError if it is empty, or if a part of it would be lost."""
    try:
        prompt.encode("utf-8")
    except UnicodeEncodeError as error:  # a command's arguments may be any bytes
        raise InputError("prompt", "be UTF-8 text", repr(prompt)) from error
    if dropped := tokenizer.dropped(prompt) if isinstance(tokenizer, FileTokenizer) else "":
        expected = "have characters that the tokenizer has tokens for"
        raise InputError("prompt", expected, repr(dropped))
    try:
        tokens = tokenizer.encode(prompt)
    except InputError as error:
        raise error.renamed({"text": "prompt"}) from error
    if not tokens:
        raise InputError("prompt", "have at least one token", repr(prompt))
    return tokens


def printable(text: str) -> str:
    """Replace control characters except newline and tab: a byte model may emit escape sequences."""
    return "".join("\ufffd" if category(c) == "Cc" and c not in "\n\t" else c for c in text)


def describe(tokenizer: Tokenizer) -> dict[str, Any]:
    """Return the JSON values from which `restore` makes the tokenizer again."""
    if isinstance(tokenizer, FileTokenizer):
        text, token, template = tokenizer.text, tokenizer.document_token, tokenizer.chat_template
        # An entry for all would change their checksums.
        more = {} if template is None else {"chat_template": template}
        return {"kind": tokenizer.kind, "text": text, "document_token": token, **more}
    return {"kind": tokenizer.kind, "table": getattr(tokenizer, "table", None)}


def restore(description: Any) -> Tokenizer:
    """Return the tokenizer that `describe` described; raise InputError for anything else."""
    match description:
        case "bytes" | {"kind": "bytes"}:
            return ByteTokenizer()
        case "gpt2" | {"kind": "gpt2"}:
            return GPT2Tokenizer()
        case {"kind": "file", "text": str(text)}:
            more = (description.get(name) for name in ("document_token", "chat_template"))
            return FileTokenizer(text, *more)
        case {"kind": "characters", "table": [str(), *others] as table} if all(
            isinstance(c, str) for c in others
        ):
            return CharTokenizer(table)
    kind = description.get("kind") if isinstance(description, dict) else description
    expected = "be bytes, gpt2 or characters with a table, or file with its text"
    raise InputError("tokenizer", expected, repr(kind))


def restore_json(text: str, path: Path) -> Tokenizer:
    """Return the tokenizer that the text of the tokenizer.json at `path` describes.

    Raises InputError if the text is no JSON or describes no tokenizer.
    """
    try:
        description = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InputError(path, "be JSON", first_line(error)) from error
    return restore(description)


class _PlainUnpickler(pickle.Unpickler):
    """Unpickle dict, list, tuple, str and int; refuse every import, so that no code can run."""

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"it refers to {module}.{name}")


def read_meta(path: Path) -> CharTokenizer:
    """Read nanoGPT's meta.pkl without running code that a pickle may contain.

    Raises InputError unless the file holds a dict with `itos`, a complete table token → string, of
    which `stoi`, if there is one, is the inverse.
    """
    try:
        meta = _PlainUnpickler(io.BytesIO(path.read_bytes())).load()
        table = [meta["itos"][token] for token in range(len(meta["itos"]))]
        if not table or not all(isinstance(entry, str) for entry in table):
            raise ValueError("`itos` maps to something else than strings")
        numbers = {entry: token for token, entry in enumerate(table)}
        if len(numbers) < len(table) or meta.get("stoi", numbers) != numbers:
            raise ValueError("`stoi` and `itos` do not invert each other")
    except Exception as error:  # a damaged pickle can raise nearly anything
        text = f"{type(error).__name__}: {error}"  # may quote the file's control characters
        detail = "".join(c if c.isprintable() else "\ufffd" for c in text)
        expected = "be nanoGPT's meta.pkl, plain dicts of strings and numbers"
        raise InputError(path, expected, detail) from error
    return CharTokenizer(table)
