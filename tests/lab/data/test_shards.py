"""Shards read like one array; a prepared directory loads as a corpus, or says why not."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ddl.errors import InputError
from ddl.lab import data
from ddl.lab.data import ByteTokenizer, Corpus, Shards, corpus, sources
from ddl.lab.data.prepare import prepare
from ddl.lab.data.shards import PARTS, open_shards, read_index
from ddl.lab.load import load
from ddl.lab.train import Trainer, train
from ddl.lab.train.runs import load_tokenizer
from tests.support.prepare_cases import (
    as_lines,
    configuration,
    documents,
    read_documents,
    write_tokenizer,
)
from tests.support.train_cases import quiet, short


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Many small shards of token pairs."""
    folder = tmp_path_factory.mktemp("prepared")
    as_lines(folder / "a.jsonl", documents(300))
    file = write_tokenizer(folder / "tokenizer.json")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sources, "UNIT", 2048)
        options = {"tokenizer": str(file), "shard_tokens": 500}
        prepare(configuration(folder / "a.jsonl", folder / "out", **options))
    return folder / "out"


def whole(folder: Path, part: str) -> np.ndarray[Any, Any]:
    """The part's tokens, from the files."""
    files = sorted(folder.glob(f"{part}-*.bin"))
    return np.concatenate([np.fromfile(file, "<u2") for file in files])


# --- reading --------------------------------------------------------------------------------------


@pytest.mark.parametrize("part", PARTS)
def test_windows_across_shards(part: str, prepared: Path) -> None:
    expected = whole(prepared, part)
    shards = Shards(prepared, read_index(prepared), part)
    assert len(shards) == len(expected) > 2000
    assert len(list(prepared.glob(f"{part}-*.bin"))) > 5
    for width in (1, 7, 600, 1500):
        for start in range(0, len(expected) - width, 37):
            window = shards[start : start + width]
            assert np.array_equal(window, expected[start : start + width])
            assert window.dtype == np.uint16
    for window in (slice(None), slice(0, 0), slice(5, 3), slice(10, 10**9), slice(-9, None)):
        assert np.array_equal(shards[window], expected[window])


@pytest.mark.parametrize("part", PARTS)
def test_document_starts_of_windows(part: str, prepared: Path) -> None:
    shards = Shards(prepared, read_index(prepared), part)
    expected = np.zeros(len(shards), bool)
    lengths = [len(tokens) for tokens in read_documents(prepared)[part]]
    expected[np.cumsum([0, *lengths[:-1]])] = True
    assert np.array_equal(whole(prepared, part) == 0, expected)  # each begins with token 0
    for width in (1, 7, 600, 1500):
        for start in range(0, len(shards) - width, 37):
            window = slice(start, start + width)
            assert np.array_equal(shards.document_starts(window), expected[window])


def test_batches_and_their_document_starts(prepared: Path) -> None:
    parts = data.load(prepared)
    windows, marks = data.batch(parts.train, 50, 64, seed=1, step=2, documents=True)
    assert marks is not None
    assert (windows.dtype, marks.dtype) == (torch.int64, torch.bool)
    assert windows.shape == marks.shape == (50, 64)
    assert torch.equal(windows == 0, marks)
    assert data.batch(parts.train, 50, 64, seed=1, step=2).document_starts is None
    batches = list(data.evaluation_batches(parts.validation, 4, 64, 0, documents=True))
    evaluated = torch.cat([batch.tokens for batch in batches])
    assert torch.equal(
        evaluated.flatten(),
        torch.from_numpy(whole(prepared, "validation")[: evaluated.numel()].astype(np.int64)),
    )
    assert all(torch.equal(batch.tokens == 0, batch.document_starts) for batch in batches)


def test_plain_tokens_do_not_know_their_documents() -> None:
    sentence = (
        "`data` must be a directory of `ddl prepare`, which knows where documents start, to keep"
        " them apart, got another corpus"
    )
    with pytest.raises(InputError, match=f"^{re.escape(sentence)}$"):
        data.batch(data.load("topics").train, 1, 8, seed=0, step=0, documents=True)


def test_training_with_separate_documents(prepared: Path, tmp_path: Path) -> None:
    """The trainer's loss is the model's with the starts; a document does not see the one before."""
    config = short(tmp_path, data=str(prepared), separate_documents=True)
    config = replace(config, model=replace(config.model, vocab_size=400, block_size=64))
    trainer = Trainer(config, data.load(prepared), torch.device("cpu"))
    size, block = config.batch_size, config.model.block_size
    idx, starts = data.batch(
        trainer.corpus.train, size, block, seed=config.seed, step=0, documents=True
    )
    assert starts is not None
    assert starts[:, 1:].any()
    with torch.no_grad():
        apart = trainer.model(idx, labels=idx, document_starts=starts).loss
        packed = trainer.model(idx, labels=idx).loss
    assert trainer.step().loss.item() == pytest.approx(apart.item(), rel=1e-6)
    assert packed.item() != pytest.approx(apart.item(), rel=1e-4)


def test_every_token_counts_the_same(prepared: Path, tmp_path: Path) -> None:
    """With documents of any length: however batches are divided, and in the validation loss."""
    config = short(tmp_path, data=str(prepared), separate_documents=True, eval_batches=0)
    config = replace(config, model=replace(config.model, vocab_size=400, block_size=32))
    corpus = data.load(prepared)
    found = []
    for size, parts in ((8, 1), (2, 4), (1, 8)):
        divided = replace(config, batch_size=size, accumulation=parts)
        trainer = Trainer(divided, corpus, torch.device("cpu"))
        evaluated, step = trainer.evaluate(), trainer.step()
        found.append((evaluated, step.loss.item(), step.grad_norm.item()))
    assert found[1] == pytest.approx(found[0], rel=2e-6)
    assert found[2] == pytest.approx(found[0], rel=2e-6)


def test_documents_of_one_token(tmp_path: Path) -> None:
    """A batch without a token to predict has no mean loss."""
    for words, sentence in ((1, "a batch of step 1"), (2, None)):
        as_lines(tmp_path / "a.jsonl", [chr(33 + i % 90) * (1 + i % words) for i in range(400)])
        prepare(configuration(tmp_path / "a.jsonl", tmp_path / f"{words}"))
        config = short(tmp_path, data=str(tmp_path / f"{words}"), separate_documents=True)
        config = replace(config, batch_size=1, accumulation=40, eval_batches=0)
        config = replace(config, model=replace(config.model, block_size=2))
        trainer = Trainer(config, data.load(tmp_path / f"{words}"), torch.device("cpu"))
        if sentence is None:
            assert trainer.step().loss.isfinite()
            assert math.isfinite(trainer.evaluate() or math.nan)
            continue
        expected = "`separate_documents` must leave tokens to predict, got "
        end = " in which every document is one token"
        for call, where in ((trainer.step, sentence), (trainer.evaluate, "the validation windows")):
            with pytest.raises(InputError, match=f"^{expected}{where}{end}$"):
                call()


def test_training_and_sampling(prepared: Path, tmp_path: Path) -> None:
    """A run keeps the tokenizer: its directory alone is enough to sample."""
    config = short(tmp_path, data=str(prepared), steps=2)
    config = replace(config, model=replace(config.model, vocab_size=400))
    run = train(config, quiet()).run
    model, tokenizer = load(run.path, "cpu")
    assert tokenizer is not None
    text = "The statement läuft"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert model.config.vocab_size == 400


# --- checks ---------------------------------------------------------------------------------------


def test_a_vocabulary_that_is_too_small(prepared: Path) -> None:
    parts = data.load(prepared)
    assert parts.largest_token == max(whole(prepared, part).max() for part in PARTS)
    sentence = f"`vocab_size` must be at least 400 for `{prepared}`, got 399"
    with pytest.raises(InputError, match=f"^{re.escape(sentence)}$"):
        parts.check(8, 399)
    parts.check(8, 400)


def test_tokens_beyond_the_vocabulary_of_plain_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The largest token is found wherever it is, in chunks."""
    monkeypatch.setattr(corpus, "CHUNK", 16)
    for name, at in (("train.bin", 99), ("val.bin", 0), ("train.bin", 33)):
        for other in ("train.bin", "val.bin"):
            tokens = np.full(100, 3, np.uint16)
            tokens[at if other == name else 5] = 300 if other == name else 4
            tokens.tofile(tmp_path / other)
        parts = replace(data.load(tmp_path), tokenizer=ByteTokenizer())
        parts.check(8, 301)
        sentence = f"`{tmp_path}` must hold tokens below `vocab_size` = 300, got 300"
        with pytest.raises(InputError, match=f"^{re.escape(sentence)}$"):
            parts.check(8, 300)


def change(folder: Path, **values: Any) -> Path:
    index = json.loads((folder / "index.json").read_text("utf-8"))
    (folder / "index.json").write_text(json.dumps(index | values), encoding="utf-8")
    return folder


@pytest.fixture
def small(tmp_path: Path) -> Path:
    as_lines(tmp_path / "a.jsonl", documents(60))
    prepare(configuration(tmp_path / "a.jsonl", tmp_path / "out"))
    return tmp_path / "out"


def refused(folder: Path, sentence: str) -> None:
    with pytest.raises(InputError, match=f"^{re.escape(sentence)}"):
        data.load(folder)


def test_a_damaged_index_is_refused(small: Path) -> None:
    data.load(small).check(8, 256)
    whole, index = (small / "index.json").read_bytes(), small / "index.json"
    no_index = f"`data` must be a directory of `ddl prepare`, got {index}, which is no such index: "
    for content in (b"", b"{}", b"[]", whole[:-9], b'{"format": "ddl-shards", "version": 1}'):
        index.write_bytes(content)
        refused(small, no_index)
    index.write_bytes(whole)
    newer = "if a newer ddl-rs wrote it, install that version"
    for values, got in (
        ({"version": 2}, f"format 'ddl-shards', version 2; {newer}"),
        ({"dtype": "float32"}, "dtype 'float32'"),
        ({"largest_token": "x"}, "numbers that are not integers"),
        *(({"next": place}, "next (") for place in ([], [1], [0, -1], [0, 1.5], "ab", [True, 0])),
        ({"made_of": {}}, "'options'"),
        ({"made_of": {"options": {}, "versions": 3}}, "versions 3"),
        ({"colour": 3}, f"the unknown field 'colour'; {newer}"),
    ):
        change(small, **values)
        refused(small, no_index + got)
        index.write_bytes(whole)
    for field, value, got in (
        ("name", "../../train-00000", "a shard '../../train-00000'"),
        ("sha256", "\ud800", "checksums of 'train-00000' that are not SHA-256"),
        ("starts_sha256", None, "checksums of 'train-00000' that are not SHA-256"),
    ):
        shards = json.loads(whole)["shards"]
        shards["train"][0][field] = value
        change(small, shards=shards)
        refused(small, no_index + got)


def test_an_interrupted_preparation_is_refused(small: Path) -> None:
    change(small, next=[0, 1])
    refused(
        small,
        f"`data` must be a complete directory of `ddl prepare`, got {small}, which was interrupted:"
        " run the same command again, and it goes on",
    )


def test_shards_that_do_not_fit_their_index_are_refused(small: Path) -> None:
    index = small / "index.json"
    whole = index.read_bytes()
    change(small, largest_token=256)
    refused(small, f"`data` must hold tokens of its tokenizer, below 256, got {small} with 256")
    index.write_bytes(whole)
    file, listed = small / "train-00000.bin", read_index(small).tokens("train")
    file.write_bytes(file.read_bytes()[:-5])
    expected = f"`data` must have the shards of its index.json, train-00000.bin with {listed}"
    refused(small, f"{expected} bytes, got {file}, which has {listed - 5} bytes")
    file.unlink()
    refused(small, f"{expected} bytes, got {file}, which cannot be read: No such file or directory")


@pytest.mark.parametrize("suffix", ["bin", "starts"])
def test_a_shard_that_is_cut_short_while_it_is_used(suffix: str, small: Path) -> None:
    shards = data.load(small).train
    assert isinstance(shards, Shards)
    file = next(small.glob(f"train-*.{suffix}"))
    size = file.stat().st_size
    os.truncate(file, 0)
    sentence = f"`data` must keep the {size} bytes that it was opened with, got {file}, now with 0"
    with pytest.raises(InputError, match=f"^{re.escape(sentence)}$"):
        data.batch(shards, 2, 16, seed=0, step=0, documents=True)


def test_a_damaged_tokenizer(small: Path) -> None:
    (small / "tokenizer.json").write_text("{")
    with pytest.raises(InputError, match=re.escape(f"`{small / 'tokenizer.json'}` must be JSON")):
        data.load(small)
    (small / "tokenizer.json").write_text('{"kind": "words"}')
    with pytest.raises(InputError, match=r"^`tokenizer` must be bytes, gpt2 or characters with a"):
        data.load(small)


@pytest.mark.parametrize("field", ["kind", "text", "document_token"])
def test_a_tokenizer_that_was_changed_is_refused(
    field: str, prepared: Path, tmp_path: Path
) -> None:
    """It would give other bits per byte."""
    folder = Path(shutil.copytree(prepared, tmp_path / "data"))
    file = folder / "tokenizer.json"
    whole = json.loads(file.read_text())
    changed = {"kind": "characters", "text": whole["text"] + " ", "document_token": None}
    table = {"table": [chr(i) for i in range(400)]}
    file.write_text(json.dumps(whole | table | {field: changed[field]}))
    refused(
        folder,
        f"`data` must have the tokenizer of its index.json, got {file}, whose checksum is another:"
        " it was damaged or changed; copy the file again, or remove the directory and prepare it"
        " again",
    )


@pytest.mark.parametrize("token", [-1, 400, 10**30, 2**32, "x", True, 1.5, [0]])
def test_a_marker_that_is_no_token_is_refused(token: Any, prepared: Path, tmp_path: Path) -> None:
    """Also if the index has the checksum of such a tokenizer, and in a run."""
    folder = Path(shutil.copytree(prepared, tmp_path / "data"))
    described = json.loads((folder / "tokenizer.json").read_text()) | {"document_token": token}
    (folder / "tokenizer.json").write_text(json.dumps(described))
    change(folder, made_of=read_index(folder).made_of | {"options": {"tokenizer": "any"}})
    sentence = "`document_token` must be a token of the tokenizer's vocabulary, got "
    refused(folder, sentence + repr(token))
    with pytest.raises(InputError, match=re.escape(sentence + repr(token))):
        load_tokenizer(folder, None)


def test_a_part_without_a_whole_block(small: Path) -> None:
    parts = data.load(small)
    count = len(parts.validation)
    sentence = (
        f"the validation part of `{small}` must have at least one block of {count + 1} tokens, got"
        f" {count}"
    )
    with pytest.raises(InputError, match=f"^{re.escape(sentence)}$"):
        parts.check(count + 1, 256)


# --- checksum -------------------------------------------------------------------------------------


def plain(tokens: np.ndarray[Any, Any], **changes: Any) -> str:
    whole = Corpus("a", tokens, np.arange(99, dtype=np.uint8), ByteTokenizer(), 255)
    return replace(whole, **changes).checksum()


def test_a_checksum_tells_corpora_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = np.arange(5000, dtype=np.uint16)
    other = tokens.copy()
    other[4999] += 1
    seen = [
        plain(tokens),
        plain(other),
        plain(tokens[:-1]),
        plain(tokens.view(np.int16)),
        plain(tokens, validation=np.arange(98, dtype=np.uint8)),
        plain(tokens, tokenizer=data.CharTokenizer("ab")),
    ]
    assert len(set(seen)) == len(seen)
    assert plain(tokens.copy(), name="b") == seen[0]
    assert re.fullmatch(r"[0-9a-f]{64}", seen[0])
    monkeypatch.setattr(corpus, "HASHED_WHOLE", 100)
    monkeypatch.setattr(corpus, "SAMPLE", 4)
    assert plain(other) != plain(tokens)  # the last block is one of them


def test_a_long_part_is_hashed_in_evenly_spaced_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(corpus, "HASHED_WHOLE", 1000)
    monkeypatch.setattr(corpus, "SAMPLE", 4)
    tokens = np.arange(10_000, dtype=np.uint16)
    blocks = [np.frombuffer(block, np.uint16) for block in corpus._samples(tokens)]
    assert len(blocks) == 1024
    assert {len(block) for block in blocks} == {2}
    assert (blocks[0][0], blocks[-1][-1]) == (0, 9999)


def test_the_checksum_of_shards_is_their_indexs(prepared: Path, small: Path) -> None:
    _, training, _, _ = open_shards(prepared)
    before = data.load(prepared).checksum()
    assert before != data.load(small).checksum()
    assert data.load(prepared).checksum() == before
    index = read_index(prepared)
    for changed in ({"sha256": "0" * 64}, {"starts_sha256": "0" * 64}):
        shards = [replace(index.shards["train"][0], **changed), *index.shards["train"][1:]]
        other = Shards(prepared, replace(index, shards=index.shards | {"train": shards}), "train")
        assert other.checksum != training.checksum
