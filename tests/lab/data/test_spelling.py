"""Bytes per token: those of the text that is predicted, counted here by hand."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import AddedToken, decoders, normalizers
from tokenizers import Tokenizer as Backend

from ddl.lab import data
from ddl.lab.data import CharTokenizer, Corpus, FileTokenizer, GPT2Tokenizer
from ddl.lab.data.prepare import prepare
from ddl.lab.data.shards import PARTS, TRAIN, Shards, read_index
from ddl.lab.data.spelling import spelling
from ddl.lab.train import Trainer
from ddl.lab.train.metrics import Metrics
from tests.support import tokenizer_files as files
from tests.support.prepare_cases import as_lines, configuration, read_documents
from tests.support.train_cases import short

ASCII = ["the cat sat on the mat", "a hat sat", "with a cat on that mat", "the hat", "mat"] * 3
TEXTS = [f"{text} naïve 犰狳🙂 {i} \n" for i, text in enumerate(ASCII)]
WORDS = [f"{text} naïve 犰狳🙂" for text in ASCII]  # between words is one space each
LOWER = normalizers.Sequence(
    [normalizers.NFD(), normalizers.StripAccents(), normalizers.Lowercase()]
)


def lowered(text: str) -> str:
    return LOWER.normalize_str(text)


class Case:
    """A tokenizer and texts; spelled: a text as its tokens spell it."""

    def __init__(
        self, made: Backend, texts: list[str] = TEXTS, spelled: Callable[[str], str] = str
    ) -> None:
        self.made, self.texts, self.spelled = made, texts, spelled


CASES = {
    "byte-level": lambda: Case(files.byte_level(TEXTS)),
    "byte-level, a space before": lambda: Case(files.byte_level(TEXTS, prefix=True)),
    "byte-level, normalized": lambda: Case(
        files.byte_level([lowered(t) for t in TEXTS], normalizer=LOWER),
        [text.title() for text in TEXTS],
        lowered,
    ),
    "byte fallback": lambda: Case(files.byte_fallback()),
    "metaspace": lambda: Case(files.metaspace(TEXTS), WORDS),
    "word pieces": lambda: Case(files.word_pieces(WORDS), WORDS),
    "words": lambda: Case(files.words(WORDS), WORDS),
    "characters": lambda: Case(
        files.characters(TEXTS, decoder=decoders.Fuse()), [*TEXTS, "the <code> sat"]
    ),
}


def size(text: str) -> int:
    return len(text.encode())


@pytest.mark.parametrize("marked", ["auto", "none"])
@pytest.mark.parametrize("name", CASES)
def test_the_bytes_of_a_part_are_those_of_its_texts(name: str, marked: str, tmp_path: Path) -> None:
    """In one window over a part; markers count nothing, and the first token is not predicted."""
    case = CASES[name]()
    case.made.save(str(tmp_path / "tokenizer.json"))
    as_lines(tmp_path / "a.jsonl", case.texts)
    config = configuration(
        tmp_path / "a.jsonl", tmp_path / "out", tokenizer=str(tmp_path / "tokenizer.json"),
        document_token=marked, validation=0.4,
    )  # fmt: skip
    prepare(config)
    corpus, found = data.load(tmp_path / "out"), spelling(data.load(tmp_path / "out").tokenizer)
    assert found is not None
    texts = {tuple(case.made.encode(text).ids): case.spelled(text) for text in case.texts}
    for part, tokens in ((TRAIN, corpus.train), ("validation", corpus.validation)):
        documents = [d.tolist() for d in read_documents(tmp_path / "out")[part]]
        bare = [tuple(d[1:] if marked == "auto" else d) for d in documents]
        total = sum(size(texts[document]) for document in bare)
        begun = [found.lengths[d[0]] - found.added for d in bare]  # is not predicted at a start
        for apart in (False, True):
            window = [slice(0, len(tokens))]
            predicted = len(tokens) - (len(documents) if apart else 1)
            missing = 0 if marked == "auto" else sum(begun) if apart else begun[0]
            counted = found.bytes_per_token(tokens, window, apart=apart) * predicted
            assert counted == pytest.approx(total - missing, rel=1e-12)
            assert total - missing > 30


def test_a_token_of_half_a_character_counts_its_bytes() -> None:
    made = files.byte_level(TEXTS)
    found = spelling(FileTokenizer(made.to_str()))
    assert found is not None
    split = [t for t in made.encode("犰").ids if "\ufffd" in made.decode([t])]
    assert len(split) >= 2
    assert found.lengths[made.encode("犰").ids].sum() == 3
    assert found.lengths[made.token_to_id(files.END)] == 0


@pytest.mark.parametrize(
    "made", [files.byte_level(TEXTS), files.byte_fallback(), files.metaspace(TEXTS)]
)
def test_an_added_token_counts_the_bytes_of_its_text(made: Backend) -> None:
    """Also if its name is one that the decoder would read as bytes or as a space."""
    names = ["naïveté", "éé", "Ġx", "a▁b", "<0x41>", "<code>", "  ", "狳狳"]
    names = [name for name in names if made.token_to_id(name) is None]
    made.add_tokens([AddedToken(name, special=False, normalized=False) for name in names])
    found = spelling(FileTokenizer(made.to_str()))
    assert found is not None
    counted = [int(found.lengths[made.token_to_id(name)]) for name in names]
    assert counted == [size(name) for name in names]
    assert len(names) >= 7


def test_a_token_that_spells_two_texts_has_no_bytes() -> None:
    """The letter é is the token of the byte 0xE9, too, with which other characters begin."""
    made = files.byte_level(TEXTS)
    made.add_tokens([AddedToken("the", special=False)])
    assert spelling(FileTokenizer(made.to_str())) is not None
    made.add_tokens([AddedToken("é", special=False)])
    assert spelling(FileTokenizer(made.to_str())) is None


def test_a_special_token_that_text_has_counts_its_bytes() -> None:
    """č is the token of a carriage return; a text has it as that alone, as with "the"."""
    made = files.byte_level(TEXTS)
    text = "the čat\r\n Ġx the\r"
    plain = spelling(FileTokenizer(made.to_str()))
    made.add_special_tokens(["č", "Ġx", "the"])
    tokenizer = FileTokenizer(made.to_str())
    found, tokens = spelling(tokenizer), tokenizer.encode(text)
    assert plain is not None
    assert found is not None
    assert made.token_to_id("the") in tokens
    assert found.lengths[tokens].sum() == plain.lengths[tokens].sum() == size(text)
    assert found.lengths[made.token_to_id("Ġx")] == found.lengths[made.token_to_id(files.END)] == 0


def test_words_that_a_marker_spells_are_text(tmp_path: Path) -> None:
    """The marker is an ordinary word; in a text it counts."""
    made = files.words(WORDS)
    made.save(str(tmp_path / "tokenizer.json"))
    as_lines(tmp_path / "a.jsonl", WORDS)
    config = configuration(
        tmp_path / "a.jsonl", tmp_path / "out", tokenizer=str(tmp_path / "tokenizer.json"),
        document_token="cat", validation=0.4,
    )  # fmt: skip
    prepare(config)
    corpus = data.load(tmp_path / "out")
    found = spelling(corpus.tokenizer)
    assert found is not None
    tokens, documents = corpus.train, read_documents(tmp_path / "out")[TRAIN]
    total = sum(size(made.decode(document[1:].tolist())) for document in documents)
    counted = found.bytes_per_token(tokens, [slice(0, len(tokens))], apart=False)
    assert counted * (len(tokens) - 1) == pytest.approx(total)
    assert any(made.token_to_id("cat") in document[1:] for document in documents)


def test_tokens_that_spell_no_text_have_no_bytes() -> None:
    """Without a decoder there would be spaces between the characters of a word."""
    assert spelling(FileTokenizer(files.characters(TEXTS).to_str())) is None


def test_gpt2s_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    class Encoding:
        def decode_single_token_bytes(self, token: int) -> bytes:
            return b"x" * (token % 7)

    monkeypatch.setattr("ddl.models.tokenizers.gpt2_encoding", Encoding)
    found = spelling(GPT2Tokenizer())
    assert found is not None
    tokens = np.array([1, 2, 50256, 6, 50300], np.uint16)  # a marker, and one that pads the model
    assert found.bytes_per_token(tokens, [slice(0, 5)], apart=False) == 8 / 4
    monkeypatch.undo()
    monkeypatch.setitem(sys.modules, "tiktoken", None)
    assert spelling(GPT2Tokenizer()) is None


def test_characters() -> None:
    found = spelling(CharTokenizer([*"aß犰\ud800", files.END]))
    assert found is not None
    assert found.lengths[:6].tolist() == [1, 2, 3, 3, 0, 0]


# --- in training ----------------------------------------------------------------------------------


def ordered(marker: bool) -> Corpus:
    """A corpus whose second half has characters of three bytes."""
    tokens = np.array([i % 2 for i in range(40_000)] + [2, 3] * 20_000 + [0, 2] * 20, np.uint16)
    if marker:
        tokens[::50] = 4
    return Corpus("x", tokens[:70_000], tokens[7:], CharTokenizer([*"ab犰狳", files.END]), 4)


@pytest.mark.parametrize("marker", [False, True])
@pytest.mark.parametrize("eval_batches", [0, 7])
def test_records_have_the_bits_of_the_bytes_that_are_predicted(
    marker: bool, eval_batches: int, tmp_path: Path
) -> None:
    config = short(tmp_path, "additive", eval_batches=eval_batches, accumulation=2)
    trainer = Trainer(config, ordered(marker), torch.device("cpu"))
    metrics, block = Metrics(trainer), config.model.block_size
    for _ in range(3):
        trainer.step()
    table = np.array([1, 1, 3, 3, 0])

    def bits(loss: float, tokens: Any) -> float:
        counted = table[torch.cat(list(tokens))[:, 1:].numpy()]
        return loss / math.log(2) / float(counted.mean())

    corpus, size = trainer.corpus, config.batch_size
    windows = data.evaluation_batches(corpus.validation, size, block, eval_batches)
    expected = bits(2.5, (w.tokens for w in windows))
    assert metrics.of_validation(2.5)["bits_per_byte"] == pytest.approx(expected, rel=1e-12)
    steps = (
        data.batch(corpus.train, 2 * size, block, seed=config.seed, step=step) for step in (1, 2)
    )
    expected = bits(2.5, (w.tokens for w in steps))
    assert metrics.of_training(2.5, 2)["bits_per_byte"] == pytest.approx(expected, rel=1e-12)


def test_the_first_of_several_processes_counts_for_all(tmp_path: Path) -> None:
    config = short(tmp_path, "additive")
    trainer = Trainer(config, ordered(True), torch.device("cpu"))
    alone = Metrics(trainer).of_validation(1.0)
    for rank in (0, 1):
        stand_in = type("Processes", (), {"first": rank == 0, "count": 2, "rank": rank})
        trainer.processes = stand_in()
        found = Metrics(trainer).of_validation(1.0)
        assert found == (alone if rank == 0 else {"perplexity": math.e})


def test_unpredicted_tokens_are_not_in_the_divisor(tmp_path: Path) -> None:
    """With documents apart, as the trainer counts: no byte of a document's first token."""
    made = files.byte_level(TEXTS)
    made.save(str(tmp_path / "tokenizer.json"))
    as_lines(tmp_path / "a.jsonl", TEXTS)
    options: dict[str, Any] = {"document_token": "none", "validation": 0.4}
    file = str(tmp_path / "tokenizer.json")
    prepare(configuration(tmp_path / "a.jsonl", tmp_path / "out", tokenizer=file, **options))
    config = short(tmp_path, "additive", data=str(tmp_path / "out"), eval_batches=0)
    config = replace(config, model=replace(config.model, vocab_size=400, block_size=16))
    corpus = data.load(tmp_path / "out")
    shards = Shards(tmp_path / "out", read_index(tmp_path / "out"), PARTS[1])
    pieces = [made.id_to_token(token) for token in shards[:]]
    scored = np.ones(len(pieces) // 16 * 16, bool)
    scored[::16] = False
    counted = {}
    for apart in (False, True):
        if apart:
            scored &= ~shards.document_starts(slice(0, len(scored)))
        counted[apart] = sum(len(pieces[i]) for i in np.flatnonzero(scored)) / scored.sum()
        trainer = Trainer(replace(config, separate_documents=apart), corpus, torch.device("cpu"))
        bits = Metrics(trainer).of_validation(1.0)["bits_per_byte"]
        assert bits == pytest.approx(1 / math.log(2) / counted[apart], rel=1e-12)
    assert counted[True] != counted[False]
