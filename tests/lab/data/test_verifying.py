"""Damaged shards of the right size are refused before the first step, with the file's name."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ddl.errors import InputError
from ddl.files import checksum
from ddl.lab import data
from ddl.lab.analysis.inspect_path import inspect_path
from ddl.lab.config import InspectConfig
from ddl.lab.data import sources, verifying
from ddl.lab.data.prepare import prepare
from ddl.lab.data.verifying import size_of, verify
from ddl.lab.train import train
from tests.support.prepare_cases import (
    as_lines,
    configuration,
    contents,
    documents,
    write_tokenizer,
)
from tests.support.train_cases import quiet, short

WHAT_TO_DO = "; copy the file again, or remove the directory and prepare it again"
DAMAGED = "whose checksum is another: it was damaged or changed"


@pytest.fixture
def prepared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Several shards of token pairs; they are read in small blocks."""
    monkeypatch.setattr(sources, "UNIT", 2048)
    monkeypatch.setattr(verifying, "BLOCK", 256)
    as_lines(tmp_path / "a.jsonl", documents(200))
    file = str(write_tokenizer(tmp_path / "tokenizer.json"))
    prepare(
        configuration(tmp_path / "a.jsonl", tmp_path / "data", tokenizer=file, shard_tokens=900)
    )
    return tmp_path / "data"


def checked(folder: Path) -> None:
    corpus = data.load(folder)
    verify(corpus.shards, corpus.tokenizer.vocab_size)


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def options(tmp_path: Path, prepared: Path) -> Any:
    config = short(tmp_path, "ddl-cc", data=str(prepared))
    return replace(config, model=replace(config.model, vocab_size=400, block_size=32))


def test_what_prepare_writes_is_in_order(prepared: Path) -> None:
    """Each file is read once, whatever the share of the processes."""
    corpus, done = data.load(prepared), list[int]()
    verify(corpus.shards, 400, done.append)
    files = [p for p in prepared.iterdir() if p.suffix in (".bin", ".starts")]
    assert len(files) > 12
    assert sum(done) == size_of(corpus.shards) == sum(p.stat().st_size for p in files)
    shares = list[int]()
    for rank in range(3):
        verify(corpus.shards, 400, shares.append, (rank, 3))
    assert sum(shares) == sum(done)


@pytest.mark.parametrize("suffix", [".bin", ".starts"])
@pytest.mark.parametrize("name", ["train-00002", "validation-*"])
def test_a_flipped_bit_is_found(name: str, suffix: str, prepared: Path, tmp_path: Path) -> None:
    """Before the first step of a run, of one that goes on, and of `ddl inspect`."""
    config = options(tmp_path, prepared)
    run = train(config, quiet()).run
    before = contents_of(run.path)
    file = min(prepared.glob(f"{name}{suffix}"))
    flip(file)
    sentence = f"`data` must have the shards of its index.json, got {file}, {DAMAGED}{WHAT_TO_DO}"
    other = replace(config, out=tmp_path / "other")
    resumed = replace(config, resume=str(config.directory))
    looked = InspectConfig(run.path, tokens=32, device="cpu")
    for call in (
        lambda: train(other, quiet()),
        lambda: train(resumed, quiet()),
        lambda: inspect_path(looked, quiet()),
    ):
        with pytest.raises(InputError, match=f"^{re.escape(sentence)}$"):
            call()
    assert not other.directory.exists()
    assert contents_of(run.path) == before


def contents_of(folder: Path) -> dict[str, bytes]:
    return {str(p): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def test_a_run_verifies_its_data_once(
    prepared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[str] = []
    read = verifying._read

    def counting(path: Path, *given: Any) -> None:
        opened.append(path.name)
        read(path, *given)

    monkeypatch.setattr(verifying, "_read", counting)
    config = options(tmp_path, prepared)
    train(config, quiet())
    files = sorted(p.name for p in prepared.iterdir() if p.suffix in (".bin", ".starts"))
    assert sorted(opened) == files
    opened.clear()
    train(replace(config, resume=str(config.directory)), quiet())
    assert sorted(opened) == files


# --- an index that says the same ------------------------------------------------------------------


def rewritten(folder: Path, name: str, numbers: Any) -> Path:
    """Write a file's numbers, and its checksum into the index."""
    path = folder / name
    numbers.tofile(path)
    index = json.loads((folder / "index.json").read_text())
    stem, suffix = name.split(".")
    field = "sha256" if suffix == "bin" else "starts_sha256"
    (shard,) = (s for s in index["shards"][stem.split("-")[0]] if s["name"] == stem)
    shard[field] = checksum(path)
    (folder / "index.json").write_text(json.dumps(index))
    return path


def test_starts_that_are_none_are_refused(prepared: Path) -> None:
    """They have to ascend, also from block to block, and lie within their shard."""
    whole = contents(prepared)
    starts = np.fromfile(prepared / "train-00000.starts", "<u8")
    tokens = len(whole["train-00000.bin"]) // 2
    assert len(starts) >= 5
    far = 10**19  # beyond int64
    for change, problem in (
        ({3: starts[2]}, "whose document starts do not ascend"),
        ({3: starts[4]}, "whose document starts do not ascend"),
        ({0: 1}, "whose first document starts at token 1"),
        ({-1: tokens}, f"which has a document start at {tokens}, beyond its {tokens} tokens"),
        ({2: far}, f"which has a document start at {far}, beyond its {tokens} tokens"),
    ):
        changed = starts.copy()
        for place, value in change.items():
            changed[place] = value
        file = rewritten(prepared, "train-00000.starts", changed)
        with pytest.raises(InputError, match=re.escape(f"got {file}, {problem}{WHAT_TO_DO}")):
            checked(prepared)
    for name, content in whole.items():
        (prepared / name).write_bytes(content)
    checked(prepared)


def test_starts_ascend_from_block_to_block(tmp_path: Path) -> None:
    as_lines(tmp_path / "a.jsonl", [str(i) for i in range(900)])
    prepare(configuration(tmp_path / "a.jsonl", tmp_path / "data"))
    starts = np.fromfile(tmp_path / "data" / "train-00000.starts", "<u8")
    border = 64
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(verifying, "BLOCK", 8 * border)
        checked(tmp_path / "data")
        starts[border] = starts[border - 1]
        file = rewritten(tmp_path / "data", "train-00000.starts", starts)
        with pytest.raises(
            InputError, match=re.escape(f"got {file}, whose document starts do not")
        ):
            checked(tmp_path / "data")


def test_tokens_beyond_the_vocabulary_are_refused(prepared: Path) -> None:
    """Wherever they are, and whatever the index says is the largest."""
    tokens = np.fromfile(prepared / "train-00001.bin", "<u2")
    for place in (0, len(tokens) // 2, -1):
        changed = tokens.copy()
        changed[place] = 400
        file = rewritten(prepared, "train-00001.bin", changed)
        problem = f"got {file}, which has token 400, beyond its vocabulary of 400{WHAT_TO_DO}"
        with pytest.raises(InputError, match=re.escape(problem)):
            checked(prepared)
