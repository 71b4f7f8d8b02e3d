"""Corpora, batches, tokenizers, and their errors for files that they cannot use."""

from __future__ import annotations

import os
import pickle
import re
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from ddl.errors import InputError
from ddl.lab import data
from ddl.lab.data import corpus
from ddl.models.tokenizers import (
    ByteTokenizer,
    CharTokenizer,
    GPT2Tokenizer,
    describe,
    printable,
    read_meta,
    restore,
)

TEXT = "Ein Gürteltier – 犰狳 – läuft. " * 40


def write_directory(path: Path, meta: object = None) -> Path:
    np.arange(900, dtype=np.uint16).tofile(path / "train.bin")
    np.arange(100, dtype=np.uint16).tofile(path / "val.bin")
    if meta is not None:
        (path / "meta.pkl").write_bytes(pickle.dumps(meta))
    return path


def test_text_file_is_bytes_split_nine_to_one(tmp_path: Path) -> None:
    file = tmp_path / "text.txt"
    file.write_text(TEXT, encoding="utf-8")
    corpus = data.load(file)
    whole = np.concatenate((corpus.train, corpus.validation))
    assert whole.tobytes() == TEXT.encode()
    assert len(corpus.validation) == len(whole) // 10
    assert isinstance(corpus.train, np.memmap)
    assert corpus.tokenizer.decode(whole.tolist()) == TEXT


def test_utf8_is_checked_across_chunks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "text.txt"
    file.write_text(TEXT, encoding="utf-8")
    for chunk in (1, 2, 3, 7):
        monkeypatch.setattr(corpus, "CHUNK", chunk)
        data.load(file)
    good = TEXT.encode()
    for spoiled, byte, at in ((good + b"\xe7\x8b", "0xe7", len(good)), (b"abc\xffd", "0xff", 3)):
        file.write_bytes(spoiled)
        for chunk in (1, 2, 3, 7, 2**20):
            monkeypatch.setattr(corpus, "CHUNK", chunk)
            expected = f"got {file}, whose byte {at} is {byte}"
            with pytest.raises(InputError, match=re.escape(expected)):
                data.load(file)


def test_a_file_that_is_cut_short_while_it_is_used(tmp_path: Path) -> None:
    """To read beyond the end of a mapped file would end the process."""
    file = tmp_path / "text.txt"
    file.write_bytes(b"x" * 100_000)
    corpus = data.load(file)
    os.truncate(file, 5_000)
    sentence = (
        f"`data` must keep the 100000 bytes that it was opened with, got {file}, now with 5000"
    )
    places = (lambda: data.batch(corpus.train, 2, 64, seed=0, step=0), corpus.checksum)
    for read in (*places, lambda: list(data.evaluation_batches(corpus.validation, 1, 64, 0))):
        with pytest.raises(InputError, match=f"^{re.escape(sentence)}$"):
            read()


def test_embedded_text_is_there_and_has_no_repeated_paragraph() -> None:
    corpus = data.load("topics")
    corpus.check(256, 256)
    assert len(corpus.train) + len(corpus.validation) > 300_000
    paragraphs = data.embedded_text().decode().split("\n\n")
    assert len(paragraphs) == len(set(paragraphs))


def test_nanogpt_directory_with_and_without_meta(tmp_path: Path) -> None:
    corpus = data.load(write_directory(tmp_path))
    assert corpus.tokenizer.vocab_size == 50257
    assert corpus.train.tolist() == list(range(900))
    assert corpus.validation.tolist() == list(range(100))
    itos = dict(enumerate("abcß"))
    write_directory(tmp_path, {"vocab_size": 4, "itos": itos})
    tokenizer = data.load(tmp_path).tokenizer
    assert tokenizer.vocab_size == 4
    assert tokenizer.decode(tokenizer.encode("cabß")) == "cabß"
    assert tokenizer.decode([0, 99]) == "a\ufffd"


def write_llm_c(
    path: Path, tokens: np.ndarray, *, says: int, magic: int = 20240520, version: int = 1
) -> None:
    """A shard as llm.c and modded-nanogpt write it: 256 int32, then the tokens."""
    header = np.zeros(256, dtype="<i4")
    header[:3] = magic, version, says
    path.write_bytes(header.tobytes() + tokens.tobytes())


def test_shards_of_llm_c_are_read_without_their_header(tmp_path: Path) -> None:
    write_directory(tmp_path)
    checksum = data.load(tmp_path).checksum()
    for name, count in (("train.bin", 900), ("val.bin", 100)):
        write_llm_c(tmp_path / name, np.arange(count, dtype="<u2"), says=count)
    corpus = data.load(tmp_path)
    assert corpus.train.tolist() == list(range(900))
    assert corpus.validation.tolist() == list(range(100))
    assert corpus.largest_token == 899
    assert corpus.checksum() == checksum


def test_other_files_with_a_header_are_refused(tmp_path: Path) -> None:
    tokens, path = np.arange(900, dtype="<u2"), tmp_path / "train.bin"
    expected = "`data` must be a directory with train.bin and val.bin of GPT-2's tokens, got"

    def refused(problem: str) -> None:
        with pytest.raises(InputError, match=re.escape(f"{expected} {path}, which {problem}")):
            data.load(tmp_path)

    write_directory(tmp_path)
    behind = "tokens behind a header of llm.c, version"
    write_llm_c(path, tokens[:800], says=900)
    refused(f"has 800 {behind} 1, for 900")
    write_llm_c(path, tokens, says=900, version=2)
    refused(f"has 900 {behind} 2, for 900")
    path.write_bytes(path.read_bytes()[:6])
    refused(f"has 0 {behind} 2, for 0")
    write_llm_c(path, tokens.astype("<u4"), says=900, magic=20240801, version=7)
    refused("has llm.c's tokens of Llama 3")
    with path.open("wb") as file:
        np.save(file, tokens)
    refused("is an array of numpy.save")


def test_meta_is_read_without_executing_it(tmp_path: Path) -> None:
    marker = tmp_path / "executed"

    class Bomb:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return os.mkdir, (str(marker),)

    path = tmp_path / "meta.pkl"
    path.write_bytes(pickle.dumps({"itos": {0: "a"}, "bomb": Bomb()}))
    with pytest.raises(InputError, match=r"it refers to (posix|nt)\.mkdir$"):
        read_meta(path)
    assert not marker.exists()
    pickle.loads(path.read_bytes())  # the bomb works if the pickle is executed
    assert marker.exists()


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"no pickle",
        pickle.dumps([1, 2]),
        pickle.dumps({"itos": {}}),
        pickle.dumps({"itos": {1: "a"}}),
        pickle.dumps({"itos": {0: 5}}),
        pickle.dumps({"itos": {0: "a"}})[:-3],
        pickle.dumps({"itos": np.zeros(3)}),
        pickle.dumps({"itos": {0: "a", 1: "a"}}),
        pickle.dumps({"itos": {0: "a", 1: "b"}, "stoi": {"a": 1, "b": 0}}),
        pickle.dumps({"itos": {0: "a", 1: "b"}, "stoi": {}}),
    ],
)
def test_damaged_meta(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "meta.pkl"
    path.write_bytes(content)
    with pytest.raises(InputError, match=r"must be nanoGPT's meta\.pkl, plain dicts"):
        read_meta(path)


def test_what_meta_says_is_one_printable_line(tmp_path: Path) -> None:
    path = tmp_path / "meta.pkl"
    path.write_bytes(b"\x80\x04\x8c\x06os\x1b[2J\x8c\x05a\nb\rc\x93.")  # a name to import
    with pytest.raises(InputError, match=re.escape("to os\ufffd[2J.a\ufffdb\ufffdc") + "$"):
        read_meta(path)


def test_batches_are_windows_and_repeat_with_seed_and_step() -> None:
    tokens = np.arange(1000, dtype=np.uint16)
    draws = [
        data.batch(tokens, 64, 10, seed=seed, step=step).tokens
        for seed, step in ((1, 5), (1, 5), (2, 5), (1, 6))
    ]
    assert draws[0].shape == (64, 10)
    assert draws[0].dtype == torch.int64
    assert torch.equal(draws[0], draws[1])
    assert not torch.equal(draws[0], draws[2])
    assert not torch.equal(draws[0], draws[3])
    assert torch.equal(draws[0] - draws[0][:, :1], torch.arange(10).expand(64, 10))
    only = data.batch(tokens[:10], 3, 10, seed=0, step=0).tokens  # exactly one window exists
    assert torch.equal(only, torch.arange(10).expand(3, 10))


def test_a_slice_of_a_batch_is_drawn_alone() -> None:
    tokens = np.arange(1000, dtype=np.uint16)
    whole = data.batch(tokens, 12, 10, seed=3, step=7).tokens
    for first, last in ((0, 12), (0, 4), (4, 5), (5, 12)):
        part = data.batch(tokens, last - first, 10, seed=3, step=7, first=first).tokens
        assert torch.equal(part, whole[first:last])


def test_windows_are_spread_evenly() -> None:
    tokens = np.arange(1009, dtype=np.uint16)
    starts = data.batch(tokens, 4000, 10, seed=2**63 - 1, step=0).tokens[:, 0]
    counts = torch.histc(starts.float(), bins=10, min=0, max=1000)
    assert (counts - 400).abs().max() < 5 * 400**0.5


def test_the_windows_of_a_seed_stay_the_same() -> None:
    """A run that is resumed by a later version, or another NumPy, sees the windows of its own."""
    starts = data.batch(np.arange(1000, dtype=np.uint16), 6, 10, seed=1337, step=42).tokens[:, 0]
    assert starts.tolist() == [525, 882, 599, 958, 479, 30]


def test_both_ends_of_the_data_are_drawn() -> None:
    tokens = np.arange(12, dtype=np.uint8)
    starts = data.batch(tokens, 200, 10, seed=0, step=0).tokens[:, 0]
    assert set(starts.tolist()) == {0, 1, 2}


def test_evaluation_windows() -> None:
    tokens = np.arange(95, dtype=np.uint8)
    whole = [batch.tokens for batch in data.evaluation_batches(tokens, 4, 10, 0)]
    assert [len(b) for b in whole] == [4, 4, 1]
    assert torch.cat(whole).flatten().tolist() == list(range(90))
    some = torch.cat([batch.tokens for batch in data.evaluation_batches(tokens, 3, 10, 1)])
    assert some[:, 0].tolist() == [0, 30, 60]
    most = torch.cat([batch.tokens for batch in data.evaluation_batches(tokens, 4, 10, 99)])
    assert torch.equal(most, torch.cat(whole))


def test_byte_tokenizer() -> None:
    tokenizer = ByteTokenizer()
    assert tokenizer.decode(tokenizer.encode(TEXT)) == TEXT
    assert tokenizer.decode([97, 0xE7, 98, 300, -1, 99]) == "a\ufffdb\ufffd\ufffdc"


def test_char_tokenizer_names_the_unknown_character() -> None:
    expected = "`text` must consist of the 2 characters that the model was trained on, got 'c'"
    with pytest.raises(InputError, match=f"^{re.escape(expected)}$"):
        CharTokenizer("ab").encode("abc")


def test_gpt2_without_tiktoken_is_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tiktoken", None)
    expected = "GPT-2 tokens need the package tiktoken to be read as text: pip install tiktoken"
    with pytest.raises(InputError, match=f"^{re.escape(expected)}$"):
        GPT2Tokenizer().encode("a")


def test_gpt2_decodes_its_own_tokens_only(monkeypatch: pytest.MonkeyPatch) -> None:
    class Encoding:
        def decode_single_token_bytes(self, token: int) -> bytes:
            return {5: b"caf", 6: b"\xc3", 7: b"\xa9"}[token]

    monkeypatch.setattr("ddl.models.tokenizers.gpt2_encoding", Encoding)
    assert GPT2Tokenizer().decode([5, 6, 7, 50300]) == "café\ufffd"


def test_tokenizers_are_restored_from_their_description() -> None:
    for tokenizer in (ByteTokenizer(), CharTokenizer("xyz"), GPT2Tokenizer()):
        assert describe(restore(describe(tokenizer))) == describe(tokenizer)
    for wrong in (
        {"kind": "file"},
        {"kind": "words"},
        {"kind": "characters", "table": [1]},
        [],
        None,
    ):
        with pytest.raises(InputError, match=r"^`tokenizer` must be bytes, gpt2 or characters"):
            restore(wrong)


def test_corpus_that_does_not_fit_the_model(tmp_path: Path) -> None:
    file = tmp_path / "text.txt"
    file.write_text("x" * 99)
    corpus = data.load(file)
    corpus.check(9, 256)
    cases = {
        f"the validation part of `{file}` must have at least one block of 10 tokens, got 9": 10,
        f"the training part of `{file}` must have at least one block of 91 tokens, got 90": 91,
    }
    for sentence, block_size in cases.items():
        with pytest.raises(InputError, match=f"^{re.escape(sentence)}$"):
            corpus.check(block_size, 256)
    sentence = f"`vocab_size` must be at least 256 for `{file}`, got 255"
    with pytest.raises(InputError, match=f"^{re.escape(sentence)}$"):
        corpus.check(9, 255)


def test_files_that_cannot_be_used(tmp_path: Path) -> None:
    empty = tmp_path / "empty.txt"
    empty.touch()
    odd = tmp_path / "odd"
    odd.mkdir()
    (odd / "train.bin").write_bytes(b"abc")
    missing = tmp_path / "missing.txt"
    bins = "a directory with train.bin and val.bin"
    cases = {
        missing: f"`data` must be a text file or a directory, got {missing}, which cannot be"
        " read: No such file or directory",
        empty: f"`data` must be a text file or a directory, got {empty}, which is empty",
        tmp_path: f"`data` must be {bins}, got {tmp_path / 'train.bin'}, which"
        " cannot be read: No such file or directory",
        odd: f"`data` must be {bins}, got {odd / 'train.bin'}, whose 3 bytes are no"
        " whole number of 2-byte tokens",
        None: "`data` must name a UTF-8 text file, a directory of `ddl prepare`, or one with"
        " train.bin and val.bin, got nothing",
    }
    for source, sentence in cases.items():
        with pytest.raises(InputError, match=f"^{re.escape(sentence)}$"):
            data.load(source)


def test_printable() -> None:
    assert printable("a\tb\n\x1b[31mü\x07犬\x9b") == "a\tb\n\ufffd[31mü\ufffd犬\ufffd"
