"""`ddl prepare`: its documents are those of the inputs, and its bytes do not depend on the way."""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import re
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer as Backend

from ddl import data
from ddl.data import GPT2Tokenizer, sources
from ddl.data.prepare import Progress, prepare
from ddl.data.shards import read_index
from ddl.data.sources import is_held_out
from ddl.data.tokenizer import END_OF_TEXT
from ddl.errors import InputError
from tests.support.prepare_cases import (
    FORMATS,
    SEPARATOR,
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
KILLED = """
import sys
from pathlib import Path
from ddl.data import sources
from ddl.cli import main
if __name__ == "__main__":  # the workers import this file
    sources.UNIT = 4096
    sys.exit(main(sys.argv[1:]))
"""


@pytest.fixture
def small_units(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "UNIT", 4096)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tokenizer(tmp_path_factory.mktemp("tokenizer") / "tokenizer.json")


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
    pieces, whole = (
        [max(docs, key=len) for docs in read_documents(tmp_path / f"out-{unit}").values()]
        for unit in (2000, 2**20)
    )
    assert np.array_equal(max(pieces, key=len), max(whole, key=len))


@pytest.mark.parametrize("unit", [5, 17, 64])
def test_pieces_are_whole_characters(unit: int, tmp_path: Path) -> None:
    how = sources.Reading("text", None, 0.5, unit)
    text = "ß犰狳🙂e\u0301" * 40
    (tmp_path / "a.txt").write_text(text, encoding="utf-8")
    found = list(sources.all_units(sources.find([tmp_path]), how))
    pieces = [piece for part in found for piece in sources.pieces(part, how)]
    assert "".join(piece.text.decode("utf-8") for piece in pieces) == text
    assert [piece.begins for piece in pieces] == [True] + [False] * (len(pieces) - 1)
    assert max(len(piece.text) for piece in pieces) <= unit
    assert len({piece.held_out for piece in pieces}) == 1


def test_separators_on_the_border_of_a_block(tmp_path: Path) -> None:
    texts = ["a" * (i % 13) + "\n" * (i % 2) for i in range(300)]
    (tmp_path / "a.txt").write_text("\n\n".join(texts))
    expected = [t for t in "\n\n".join(texts).split("\n\n") if t]
    for unit in (5, 7, 64, 10_000):
        how = sources.Reading("text", b"\n\n", 0.5, unit)
        units = sources.all_units(sources.find([tmp_path]), how)
        texts = list[str]()
        for piece in (piece for part in units for piece in sources.pieces(part, how)):
            texts += [""] if piece.begins else []
            texts[-1] += piece.text.decode()
        assert texts == expected


# --- tokens ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("size", "dtype", "choice", "prefix"),
    [(400, "uint16", "auto", 0), (400, "uint16", "none", None), (400, "uint16", "Ġthe", -1)],
)
def test_the_token_before_a_document(
    size: int, dtype: str, choice: str, prefix: int | None, tmp_path: Path
) -> None:
    file = write_tokenizer(tmp_path / "tokenizer.json", size=size)
    as_lines(tmp_path / "a.jsonl", [*TEXTS[:50], f"a {END_OF_TEXT} in a text is words"])
    out = tmp_path / "out"
    prepare(configuration(tmp_path / "a.jsonl", out, tokenizer=str(file), document_token=choice))
    backend = Backend.from_file(str(file))
    if prefix == -1:
        prefix = backend.token_to_id("Ġthe")
    assert read_index(out).dtype == dtype
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

    monkeypatch.setattr("ddl.data.tokenizer._gpt2", Encoding)
    monkeypatch.setattr("ddl.data.directory.version", lambda name: f"{name} 1")
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


# --- the same bytes -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file of each format, in a directory that `ddl prepare` takes as a whole."""
    folder = tmp_path_factory.mktemp("inputs")
    (folder / "notes.md").write_text("is left out")
    for number, (name, write) in enumerate(FORMATS.items()):
        write(folder / name, documents(400, seed=number))
    return folder


@pytest.mark.parametrize("workers", [2, 3])
def test_the_same_bytes_for_any_number_of_workers(
    workers: int, inputs: Path, tmp_path: Path, tokenizer: Path, small_units: None
) -> None:
    for number in (1, workers):
        out = tmp_path / str(number)
        options = {"tokenizer": str(tokenizer), "shard_tokens": 7000, "workers": number}
        prepare(configuration(inputs, out, **options))
    assert contents(tmp_path / "1") == contents(tmp_path / str(workers))
    assert len(contents(tmp_path / "1")) > 20
    assert multiprocessing.active_children() == []


def command(inputs: Path, out: Path, tokenizer: Path, workers: int) -> list[str]:
    options = f"--shard-tokens 3000 --validation 0.2 --workers {workers}".split()
    options += ["--separator", SEPARATOR, "--tokenizer", str(tokenizer)]
    return ["prepare", str(inputs), "--out", str(out), *options]


def start(script: Path, arguments: list[str]) -> subprocess.Popen[bytes]:
    script.write_text(KILLED)
    command = [sys.executable, str(script), *arguments]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)


@pytest.mark.parametrize("workers", [1, 2])
def test_a_killed_preparation_goes_on(
    workers: int, inputs: Path, tmp_path: Path, tokenizer: Path, small_units: None
) -> None:
    """It is killed after some shards, again and again; the files are those of one call."""
    options = {"tokenizer": str(tokenizer), "shard_tokens": 3000}
    prepare(configuration(inputs, tmp_path / "whole", **options))
    out, choose = tmp_path / "out", random.Random(workers)
    last = len(read_index(tmp_path / "whole").shards["train"])
    shards, kills, kept = -1, 0, dict[Path, int]()
    while True:
        process = start(tmp_path / "run.py", command(inputs, out, tokenizer, workers))
        goal = shards + choose.randrange(1, 14)
        while process.poll() is None:
            done = len(list(out.glob("train-*.bin")))
            if done >= goal and done < last:
                process.send_signal(signal.SIGKILL)
            time.sleep(0.001)
        _, said = process.communicate()
        if process.returncode == 0:
            break
        assert process.returncode == -signal.SIGKILL, said
        kills += 1
        shards = len(list(out.glob("train-*.bin")))
        if (out / "index.json").exists():
            listed = [out / f"{shard.name}.bin" for shard in read_index(out).shards["train"]]
            kept |= {file: file.stat().st_mtime_ns for file in listed}
        if kills == 2:  # what a kill within a step leaves behind
            (out / ".train-00099.bin.0123abcd.tmp").write_bytes(b"half")
            (out / "validation-00099.starts").write_bytes(b"")
    assert kills >= 3
    assert len(kept) >= 3
    assert {file: file.stat().st_mtime_ns for file in kept} == kept  # they were not written again
    assert contents(out) == contents(tmp_path / "whole")


def test_workers_end_with_a_killed_parent(inputs: Path, tmp_path: Path, tokenizer: Path) -> None:
    process = start(tmp_path / "run.py", command(inputs, tmp_path / "out", tokenizer, 2))
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    if not children.exists():
        process.kill()
        pytest.skip("reads Linux's /proc")
    found: list[str] = []
    while len(found) < 3 and process.poll() is None:  # a tracker of resources and two workers
        found = children.read_text().split()
    process.kill()
    process.wait()
    deadline = time.monotonic() + 60
    while left := [int(pid) for pid in found if _runs(pid)]:
        if time.monotonic() > deadline:
            for pid in left:
                os.kill(pid, signal.SIGKILL)
            pytest.fail("workers outlive their parent")
        time.sleep(0.05)


def _runs(pid: str) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def test_a_worker_that_is_killed_is_a_sentence(
    inputs: Path, tmp_path: Path, tokenizer: Path, small_units: None
) -> None:
    config = configuration(inputs, tmp_path / "out", tokenizer=str(tokenizer), workers=2)

    def kill_one(progress: Progress) -> None:
        children = multiprocessing.active_children()
        if children and children[0].pid:
            with suppress(ProcessLookupError):  # it was killed in the call before
                os.kill(children[0].pid, signal.SIGKILL)

    expected = (
        "`workers` must fit on this machine, got 2, one of which was ended from outside, perhaps"
        " for lack of memory"
    )
    with pytest.raises(InputError, match=f"^{re.escape(expected)}$"):
        prepare(config, kill_one)
    prepare(config)
    prepare(configuration(inputs, tmp_path / "whole", tokenizer=str(tokenizer)))
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


def test_a_complete_directory_stays_as_it_is(inputs: Path, tmp_path: Path) -> None:
    config = configuration(inputs, tmp_path / "out")
    assert not prepare(config).again
    before = contents(tmp_path / "out")
    assert prepare(config).again
    assert contents(tmp_path / "out") == before


def test_progress_reaches_the_end(inputs: Path, tmp_path: Path, small_units: None) -> None:
    seen: list[Progress] = []
    index = prepare(configuration(inputs, tmp_path / "out"), seen.append).index
    done = [progress.done for progress in seen]
    assert done == sorted(done)
    assert done[-1] == seen[-1].total == sum((inputs / name).stat().st_size for name in FORMATS)
    assert seen[-1].tokens == index.tokens("train") + index.tokens("validation")


# --- memory ---------------------------------------------------------------------------------------

PEAK = """
import re, sys
from pathlib import Path
from ddl.cli import main
status = main(sys.argv[1:])
print(re.search(r"VmHWM:\\s*(\\d+) kB", Path("/proc/self/status").read_text())[1])
sys.exit(status)
"""


@pytest.mark.parametrize("name", ["a.jsonl", "a.txt", "one.txt", "a.parquet"])
def test_memory_does_not_grow_with_the_input(name: str, tmp_path: Path) -> None:
    """80 MB take as much memory as 8."""
    if not Path("/proc/self/status").exists():
        pytest.skip("reads Linux's /proc")
    peaks = []
    for millions in (8, 80):
        texts = [f"{i} " + "word " * 200 for i in range(1000 * millions)]
        if name == "one.txt":
            (tmp_path / name).write_text("\n".join(texts))
            (tmp_path / "b.txt").write_text("held out")
        elif name == "a.parquet":
            _large_row_group(tmp_path / name, texts)
        else:
            FORMATS[name](tmp_path / name, texts)
        inputs = [tmp_path / name, *([tmp_path / "b.txt"] if name == "one.txt" else [])]
        separator = [] if name == "one.txt" else ["--separator", SEPARATOR]
        script = [sys.executable, "-c", PEAK, "prepare", *map(str, inputs), "--validation", "0.5"]
        options = ["--tokenizer", "bytes", "--workers", "1", *separator]
        out = ["--out", str(tmp_path / f"out-{millions}")]
        done = subprocess.run([*script, *options, *out], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        peaks.append(int(done.stdout.splitlines()[-1]) / 1024)
    assert peaks[1] < peaks[0] + 20, f"{peaks} MiB"


def _large_row_group(path: Path, texts: list[str]) -> None:
    import pyarrow
    from pyarrow import parquet

    table = pyarrow.table({"text": texts})
    parquet.write_table(table, path, row_group_size=len(texts), use_dictionary=False)
