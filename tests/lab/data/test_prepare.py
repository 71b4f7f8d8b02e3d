"""`ddl prepare`: its documents and tokens are those of the inputs."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer as Backend

from ddl.lab import data
from ddl.lab.data import GPT2Tokenizer, sources
from ddl.lab.data.documents import is_held_out, pieces
from ddl.lab.data.prepare import prepare
from ddl.lab.data.shards import read_index
from ddl.lab.data.units import all_units
from ddl.models.tokenizers import END_OF_TEXT
from tests.support.prepare_cases import (
    FORMATS,
    as_lines,
    as_parquet,
    as_text,
    configuration,
    contents,
    documents,
    read_documents,
    write_tokenizer,
)

TEXTS = documents(900)


# --- documents ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("kind", ["bytes", "file"])
def test_every_document_is_there_once_and_in_order(
    name: str, kind: str, tmp_path: Path, tokenizer: Path, small_units: None
) -> None:
    FORMATS[name](tmp_path / name, TEXTS)
    choice = "bytes" if kind == "bytes" else str(tokenizer)
    config = configuration(tmp_path / name, tmp_path / "out", tokenizer=choice, shard_tokens=9000)
    prepare(config)
    found = read_documents(tmp_path / "out")
    held_out = [is_held_out(text.encode(), 0.2) for text in TEXTS]
    assert 100 < sum(held_out) < 260
    for part, wanted in (("train", False), ("validation", True)):
        expected = [t for t, held in zip(TEXTS, held_out, strict=True) if held == wanted]
        if kind == "bytes":
            assert [tokens.tobytes().decode() for tokens in found[part]] == expected
        else:
            backend = Backend.from_file(str(tokenizer))
            encoded = [[0, *backend.encode(text).ids] for text in expected]
            assert [tokens.tolist() for tokens in found[part]] == encoded


def test_the_formats_agree(tmp_path: Path, small_units: None) -> None:
    """The same documents on the same sides, whatever file they come from."""
    found = []
    for name, write in FORMATS.items():
        write(tmp_path / name, TEXTS)
        prepare(configuration(tmp_path / name, tmp_path / f"{name}-out"))
        parts = read_documents(tmp_path / f"{name}-out")
        found.append({part: [t.tobytes() for t in tokens] for part, tokens in parts.items()})
    assert all(parts == found[0] for parts in found)


def test_a_directory_with_the_suffix_of_a_file(tmp_path: Path) -> None:
    """Spark writes a directory data.parquet, with a file for each part."""
    folder = tmp_path / "in" / "data.parquet"
    folder.mkdir(parents=True)
    as_parquet(folder / "part-0.parquet", TEXTS[:40])
    as_parquet(folder / "part-1.parquet", TEXTS[40:80])
    prepare(configuration(tmp_path / "in", tmp_path / "out"))
    prepare(configuration(folder, tmp_path / "again"))
    assert contents(tmp_path / "out") == contents(tmp_path / "again")


def test_line_ends_of_windows(tmp_path: Path) -> None:
    texts = [text.replace("\n", " ") for text in TEXTS[:40]]
    (tmp_path / "a.txt").write_bytes("\r\n\r\n".join(texts).encode())
    prepare(configuration(tmp_path / "a.txt", tmp_path / "out", separator=r"\r\n\r\n"))
    found = read_documents(tmp_path / "out")
    assert sorted(t.tobytes().decode() for part in found.values() for t in part) == sorted(texts)


def test_copies_of_a_document_are_on_one_side(tmp_path: Path) -> None:
    as_lines(tmp_path / "a.jsonl", TEXTS[:60])
    as_lines(tmp_path / "b.jsonl", TEXTS[:60][::-1])
    inputs = (tmp_path / "a.jsonl", tmp_path / "b.jsonl")
    prepare(configuration(inputs, tmp_path / "out"))
    sides = read_documents(tmp_path / "out")
    train, validation = ({tokens.tobytes() for tokens in sides[part]} for part in sides)
    assert train & validation == set()
    assert len(train) + len(validation) == 60


def test_empty_documents_are_left_out(tmp_path: Path) -> None:
    as_lines(tmp_path / "a.jsonl", ["", *TEXTS[:40], ""])
    (tmp_path / "a.jsonl").open("a").write("\n  \n")
    as_text(tmp_path / "b.txt", ["", *TEXTS[40:80], "", ""])
    prepare(configuration((tmp_path / "a.jsonl", tmp_path / "b.txt"), tmp_path / "out"))
    index = read_index(tmp_path / "out")
    assert index.documents("train") + index.documents("validation") == 80


def test_a_text_without_separator_is_one_document(tmp_path: Path, small_units: None) -> None:
    """It is cut into units, and each of its bytes is there once."""
    for i in range(12):
        text = " ".join(documents(100, seed=i))
        (tmp_path / f"{i:02}.txt").write_text(text, encoding="utf-8")
    config = configuration(tmp_path, tmp_path / "out", separator=None, shard_tokens=20_000)
    index = prepare(config).index
    texts = [(tmp_path / f"{i:02}.txt").read_bytes() for i in range(12)]
    assert min(map(len, texts)) > 3 * sources.UNIT
    assert len(index.shards["train"]) > 3
    found = read_documents(tmp_path / "out")
    held_out = [tokens.tobytes() for tokens in found["validation"]]
    assert sorted(held_out + [t.tobytes() for t in found["train"]]) == sorted(texts)
    assert 0 < len(held_out) < 12


def test_long_documents_are_encoded_in_pieces(tmp_path: Path, tokenizer: Path) -> None:
    """Most tokenizers give the same tokens, because a piece ends between lines or words."""
    text = "\n".join(documents(30, words=400))
    as_lines(tmp_path / "a.jsonl", [text, *TEXTS[:20]])
    for unit in (2000, 2**20):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sources, "UNIT", unit)
            out = tmp_path / f"out-{unit}"
            config = configuration(tmp_path / "a.jsonl", out, tokenizer=str(tokenizer))
            prepare(config)
    # Which side a long document is on depends on its first piece.
    in_pieces, whole = (
        [max(docs, key=len) for docs in read_documents(tmp_path / f"out-{unit}").values()]
        for unit in (2000, 2**20)
    )
    assert np.array_equal(max(in_pieces, key=len), max(whole, key=len))


@pytest.mark.parametrize("unit", [5, 17, 64])
def test_pieces_are_whole_characters(unit: int, tmp_path: Path) -> None:
    how = sources.Reading("text", None, 0.5, unit)
    text = "ß犰狳🙂e\u0301" * 40
    (tmp_path / "a.txt").write_text(text, encoding="utf-8")
    units = all_units(sources.find([tmp_path]), how)
    found = [piece for part in units for piece in pieces(part, how)]
    assert "".join(piece.text.decode("utf-8") for piece in found) == text
    assert [piece.begins for piece in found] == [True] + [False] * (len(found) - 1)
    assert max(len(piece.text) for piece in found) <= unit
    assert len({piece.held_out for piece in found}) == 1


def test_separators_on_the_border_of_a_block(tmp_path: Path) -> None:
    texts = ["a" * (i % 13) + "\n" * (i % 2) for i in range(300)]
    (tmp_path / "a.txt").write_text("\n\n".join(texts))
    expected = [t for t in "\n\n".join(texts).split("\n\n") if t]
    for unit in (5, 7, 64, 10_000):
        how = sources.Reading("text", b"\n\n", 0.5, unit)
        units = all_units(sources.find([tmp_path]), how)
        texts = list[str]()
        for piece in (piece for part in units for piece in pieces(part, how)):
            texts += [""] if piece.begins else []
            texts[-1] += piece.text.decode()
        assert texts == expected


# --- tokens ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("choice", ["auto", "none", "Ġthe"])
def test_the_token_before_a_document(choice: str, tmp_path: Path, tokenizer: Path) -> None:
    as_lines(tmp_path / "a.jsonl", [*TEXTS[:50], f"a {END_OF_TEXT} in a text is words"])
    out = tmp_path / "out"
    prepare(
        configuration(tmp_path / "a.jsonl", out, tokenizer=str(tokenizer), document_token=choice)
    )
    backend = Backend.from_file(str(tokenizer))
    prefix = {"auto": 0, "none": None}.get(choice, backend.token_to_id(choice))
    assert read_index(out).dtype == "uint16"
    for tokens in (tokens for part in read_documents(out).values() for tokens in part):
        assert prefix is None or tokens[0] == prefix
        assert 0 not in tokens[1:]
    assert data.load(out).tokenizer.document_token == prefix  # type: ignore[attr-defined]


def test_gpt2_puts_its_end_of_text_before_each_document(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Encoding:
        def encode_ordinary(self, text: str) -> list[int]:
            return list(text.encode())

    monkeypatch.setattr("ddl.models.tokenizers.gpt2_encoding", Encoding)
    monkeypatch.setattr("ddl.lab.data.directory.version", lambda name: f"{name} 1")
    as_lines(tmp_path / "a.jsonl", TEXTS[:50])
    prepare(configuration(tmp_path / "a.jsonl", tmp_path / "out", tokenizer="gpt2"))
    index, corpus = read_index(tmp_path / "out"), data.load(tmp_path / "out")
    assert (index.dtype, index.largest_token) == ("uint16", 50256)
    assert isinstance(corpus.tokenizer, GPT2Tokenizer)
    for part in read_documents(tmp_path / "out").values():
        assert {int(tokens[0]) for tokens in part} == {50256}


def test_more_than_65536_tokens_take_four_bytes(tmp_path: Path) -> None:
    values = json.loads(write_tokenizer(tmp_path / "tokenizer.json").read_text("utf-8"))
    values["model"]["vocab"]["<far>"] = 70_000
    (tmp_path / "tokenizer.json").write_text(json.dumps(values), encoding="utf-8")
    as_lines(tmp_path / "a.jsonl", TEXTS[:50])
    file, out = str(tmp_path / "tokenizer.json"), tmp_path / "out"
    prepare(configuration(tmp_path / "a.jsonl", out, tokenizer=file, document_token="<far>"))
    index = read_index(out)
    assert (index.dtype, index.vocab_size, index.largest_token) == ("uint32", 70_001, 70_000)
    assert {int(t[0]) for part in read_documents(out).values() for t in part} == {70_000}
