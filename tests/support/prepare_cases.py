"""Inputs of `ddl prepare` for the tests: documents, files of each format, a small tokenizer."""

from __future__ import annotations

import gzip
import json
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from ddl.errors import InputError
from ddl.lab.config import PrepareConfig
from ddl.lab.data.prepare import Progress, prepare
from ddl.lab.data.shards import PARTS, Index, Shards, read_index
from ddl.models.tokenizers import END_OF_TEXT


def words(count: int) -> list[str]:
    """Made-up words, a few of them frequent; the same with every Python."""
    choose = random.Random(0)
    made = ["".join(choose.choices("etaoinshrdlu.,", k=choose.randrange(1, 9))) for _ in range(500)]
    return choose.choices(["the", *made], weights=[1 / n for n in range(1, 502)], k=count)


WORDS = [*words(6000), "läuft", "犰狳", "🙂", "e\u0301"]
SEPARATOR = "\n\x1e\n"


def documents(count: int, *, seed: int = 0, words: int = 60) -> list[str]:
    """Distinct texts of up to `words` words, with line ends and characters of several bytes."""
    choose = random.Random(seed)
    return [
        f"{i}: " + choose.choice((" ", "\n")).join(choose.choices(WORDS, k=choose.randrange(words)))
        for i in range(count)
    ]


def as_lines(path: Path, texts: list[str]) -> None:
    lines = [json.dumps({"id": i, "text": text}) for i, text in enumerate(texts)]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def as_gzip(path: Path, texts: list[str]) -> None:
    as_lines(path, texts)
    path.write_bytes(gzip.compress(path.read_bytes(), 1))


def as_text(path: Path, texts: list[str]) -> None:
    path.write_text(SEPARATOR.join(texts), encoding="utf-8")


def as_parquet(path: Path, texts: list[str]) -> None:
    import pyarrow
    from pyarrow import parquet

    table = pyarrow.table({"id": list(range(len(texts))), "text": texts})
    parquet.write_table(table, path, row_group_size=100)


FORMATS: dict[str, Callable[[Path, list[str]], None]] = {
    "a.jsonl": as_lines,
    "a.json.gz": as_gzip,
    "a.txt": as_text,
    "a.parquet": as_parquet,
}


def write_tokenizer(path: Path, *, end: str | None = END_OF_TEXT, size: int = 400) -> Path:
    """Train a tokenizer.json of byte pairs, with `end` as token 0."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=[] if end is None else [end],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator([" ".join(WORDS)], trainer)
    backend.save(str(path))
    return path


def configuration(inputs: Path | tuple[Path, ...], out: Path, **options: Any) -> PrepareConfig:
    inputs = inputs if isinstance(inputs, tuple) else (inputs,)
    defaults = {"tokenizer": "bytes", "validation": 0.2, "separator": SEPARATOR, "workers": 1}
    return PrepareConfig(inputs, out, **{**defaults, **options})


def contents(folder: Path) -> dict[str, bytes]:
    """The bytes of every file."""
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def read_documents(folder: Path) -> dict[str, list[npt.NDArray[Any]]]:
    """The tokens of each document of each part."""
    index: Index = read_index(folder)
    found = {}
    for part in PARTS:
        shards = Shards(folder, index, part)
        starts = np.flatnonzero(shards.document_starts(slice(0, len(shards))))
        found[part] = np.split(shards[0 : len(shards)], starts)[1:]
    return found


def refused(sentence: str, config: PrepareConfig, *more: Callable[[Progress], object]) -> None:
    """Assert that preparing raises an InputError with this sentence."""
    with pytest.raises(InputError, match=f"^{re.escape(sentence)}$"):
        prepare(config, *more)
