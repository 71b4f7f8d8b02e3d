"""`ddl prepare`: text, JSON lines and parquet to shards of tokens.

A step writes one shard of each part and then the index, so that an interrupted preparation goes on
behind the last complete step. Shards end between units of the sources, which do not depend on the
number of processes; so neither do the files.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from ddl.errors import InputError, reason_of
from ddl.files import alone_in, new_directories
from ddl.lab.config import PrepareConfig
from ddl.lab.machine import usable_cores
from ddl.models.tokenizers import (
    END_OF_TEXT,
    ByteTokenizer,
    FileTokenizer,
    GPT2Tokenizer,
    Tokenizer,
    describe,
    read_chat_template,
)

from . import sources
from .directory import begin, clear, made_of, refuse_foreign_files
from .encoding import Encoded, Encoder, encode
from .shards import DTYPES, PARTS, TOKENIZER, TRAIN, VALIDATION, Index, ShardWriter
from .sources import Reading, Source, Unit, find, reading
from .units import all_units


class Progress(NamedTuple):
    """Bytes of the sources that are done, all of them, and the tokens that this call has made."""

    done: int
    total: int
    tokens: int


@dataclass(frozen=True)
class Prepared:
    """The complete index, and whether it was complete before this call."""

    index: Index
    was_complete: bool


def prepare(
    config: PrepareConfig, report: Callable[[Progress], object] = lambda progress: None
) -> Prepared:
    """Write the sources' tokens into `config.out`, or go on where an earlier call was ended.

    With several workers, a script calls it under `if __name__ == "__main__"`, because each worker
    imports the script.

    Raises InputError if an input, an option or the directory cannot be used; then all that was
    written is removed. Shards that are complete stay only if the same call may succeed later: if
    the disk is full, a worker process was ended, or a file cannot be read although it is there.
    """
    assert config.out is not None
    assert config.tokenizer is not None
    tokenizer, token = choose_tokenizer(config.tokenizer, config.document_token)
    separator = None if config.separator is None else _unescaped(config.separator)
    how = Reading(config.text_field, separator, config.validation, sources.UNIT)
    found = find(config.inputs)
    refuse_foreign_files(config.out)
    workers = config.workers or usable_cores()
    before = _Before(config.inputs, found)
    fresh = Index(
        dtype=_dtype(tokenizer.vocab_size),
        vocab_size=tokenizer.vocab_size,
        made_of=made_of(config, tokenizer, token, found, workers),
    )
    with new_directories(config.out), alone_in(config.out):
        index = begin(config.out, fresh, tokenizer)
        was_complete = index.next is None
        if index.next is not None:
            with _cleared_by_refusal(config.out, before):
                encoder = Encoder(describe(tokenizer), token, index.dtype, how)
                units = all_units(found, how, index.next)
                with closing(encode(units, encoder, workers)) as encoded:
                    _write_steps(config, index, _reported(encoded, before.sizes, report))
                before.refuse_changed()
                _refuse_empty(config, found, index)
            index.next = None
            index.write(config.out)
    return Prepared(index, was_complete)


def choose_tokenizer(name: str, document_token: str) -> tuple[Tokenizer, int | None]:
    """The tokenizer, and the token that is put before each document; None for none.

    name: bytes, gpt2, or the path of a tokenizer.json. document_token: auto, none or a token's
    text; auto is <|endoftext|> if the vocabulary has it. Raises InputError if there is none such.
    """
    tokenizer: Tokenizer
    if name == "bytes":
        tokenizer, known = ByteTokenizer(), dict[str, int]()
    elif name == "gpt2":
        tokenizer, known = GPT2Tokenizer(), {END_OF_TEXT: GPT2Tokenizer.vocab_size - 1}
        try:
            tokenizer.encode("")
        except InputError as error:
            raise InputError.sentence(
                f"{error}; GPT-2's tokenizer.json as `tokenizer` needs neither tiktoken nor"
                " network",
                ("tokenizer",),
            ) from error
    else:
        path = Path(name)
        tokenizer = FileTokenizer(_read_tokenizer(path))
        tokenizer.chat_template = read_chat_template(path if path.is_dir() else path.parent)
        known = tokenizer.backend.get_vocab()
    if document_token == "auto":
        token = known.get(END_OF_TEXT)
    elif document_token == "none":
        token = None
    elif document_token in known:
        token = known[document_token]
    else:
        raise InputError(
            "document_token", f"be auto, none or a token of {name}", repr(document_token)
        )
    if isinstance(tokenizer, FileTokenizer):
        tokenizer.document_token = token
    return tokenizer, token


def _read_tokenizer(path: Path) -> str:
    try:
        file = path / TOKENIZER if path.is_dir() else path
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        got = f"{path}: {reason_of(error)}"
        raise InputError("tokenizer", "be bytes, gpt2 or a tokenizer.json", got) from error


def _unescaped(separator: str) -> bytes:
    """A shell passes a line end most easily as \\n, or as \\r\\n."""
    for name, character in (("\\n", "\n"), ("\\r", "\r"), ("\\t", "\t")):
        separator = separator.replace(name, character)
    try:
        return separator.encode("utf-8")
    except UnicodeEncodeError as error:  # a command's arguments may be any bytes
        raise InputError("separator", "be UTF-8 text", repr(separator)) from error


def _dtype(vocab_size: int) -> str:
    """The smallest dtype that holds the vocabulary's tokens."""
    fits = (dtype for dtype in DTYPES if vocab_size <= 2 ** int(dtype.removeprefix("uint")))
    return next(fits)


# --- steps ----------------------------------------------------------------------------------------


def _write_steps(
    config: PrepareConfig, index: Index, encoded: Iterator[tuple[Unit, Encoded]]
) -> None:
    """Write a shard of each part again and again, each time followed by the index."""
    assert config.out is not None
    ended = False
    while not ended:
        number = len(index.shards[TRAIN])  # every step but the last writes a training shard
        with ExitStack() as files:
            writers = {
                part: ShardWriter(config.out, part, number, index.dtype, files) for part in PARTS
            }
            ended = True
            for unit, parts in encoded:
                for part, tokens in zip(PARTS, parts.parts, strict=True):
                    writers[part].append(*tokens)
                index.without_text += parts.without_text
                index.next = unit.place
                if writers[TRAIN].tokens >= config.shard_tokens:
                    ended = False
                    break
        for part, writer in writers.items():
            if writer.tokens:
                index.shards[part].append(writer.shard())
                index.largest_token = max(index.largest_token, writer.largest)
        index.write(config.out)


def _reported(
    encoded: Iterator[tuple[Unit, Encoded]],
    sizes: Sequence[int],
    report: Callable[[Progress], object],
) -> Iterator[tuple[Unit, Encoded]]:
    """Pass on the encoded units, and report the progress after each."""
    tokens = 0
    for unit, parts in encoded:
        yield unit, parts
        tokens += sum(len(part.tokens) for part in parts.parts)
        done = sum(sizes[: unit.place[0]]) + unit.read
        report(Progress(done, sum(sizes), tokens))


# --- refusals -------------------------------------------------------------------------------------


class _Before:
    """The sources as they were before they were read."""

    def __init__(self, inputs: Sequence[Path], found: Sequence[Source]) -> None:
        self._inputs, self._found = inputs, found
        self._stats = [_stat(source) for source in found]
        self.sizes = [size for size, _ in self._stats]

    def refuse_changed(self) -> None:
        """Raise InputError if a source has changed or vanished, or another one has appeared."""
        for source, before in zip(self._found, self._stats, strict=True):
            if _stat(source) != before:
                raise _changed(f"{source.path}, which changed while it was read")
        others = [source.path for source in find(self._inputs) if source not in self._found]
        if others:
            raise _changed(f"{others[0]}, which appeared while they were read")


def _stat(source: Source) -> tuple[int, int]:
    """Size in bytes and time of the last change."""
    with reading(source.path):
        found = source.path.stat()
    return found.st_size, found.st_mtime_ns


def _changed(got: str) -> InputError:
    return InputError("inputs", "stay as they are", got)


@contextmanager
def _cleared_by_refusal(out: Path, before: _Before) -> Iterator[None]:
    """Remove what was written if the block refuses the inputs; an interruption leaves it."""
    try:
        yield
    except InputError as refused:
        error = refused
        try:
            before.refuse_changed()
        except InputError as changed:  # the better sentence for what a change has damaged
            error = changed
        if not _may_pass(error):
            clear(out)
        raise error from error.__cause__


def _may_pass(error: InputError) -> bool:
    """Whether the same call may succeed later, because the machine has failed and not the input."""
    cause = error.__cause__
    number = cause.errno if isinstance(cause, OSError) else None
    return isinstance(cause, BrokenProcessPool) or number not in (None, errno.ENOENT)


def _refuse_empty(config: PrepareConfig, found: list[Source], index: Index) -> None:
    """Raise InputError if a part has no documents."""
    train, held_out = index.documents(TRAIN), index.documents(VALIDATION)
    if train and held_out:
        return
    if not train and not held_out:
        raise InputError("inputs", "have at least one document that is not empty", "none")
    must, what = ("hold out a document", "none") if train else ("leave a document", "all")
    hint = ""
    if config.separator is None and any(s.format == "text" for s in found):
        hint = (
            ": without `separator` a text file is one document, and with '\\n\\n' documents end at"
            " empty lines"
        )
    got = f"{config.validation}, which holds out {what} of {train + held_out}{hint}"
    raise InputError("validation", must, got, ("separator",))
