"""`validation`: a validation part of one's own, in place of the share held out of the data."""

from __future__ import annotations

import json
import pickle
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ddl.errors import InputError
from ddl.lab import data
from ddl.lab.cli import main
from ddl.lab.config import PrepareConfig, TrainConfig
from ddl.lab.data.prepare import prepare
from ddl.lab.load import load
from ddl.lab.train import train
from ddl.lab.train.runs import RunDirectory
from tests.support.train_cases import quiet, short, stop_at

TEXT = "".join(f"The delta rule erases what it overwrites, {i}. " for i in range(40))
OTHER = "".join(f"What it overwrites; the delta rule erases: {i}. " for i in range(20))


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text(TEXT)
    return path


@pytest.fixture
def other(tmp_path: Path) -> Path:
    path = tmp_path / "other.txt"
    path.write_text(OTHER)
    return path


def shards(folder: Path, text: Path, **options: Any) -> Path:
    given = {"tokenizer": "bytes", "separator": ". ", "validation": 0.3}
    prepare(PrepareConfig((text,), out=folder, **given | options))
    return folder


def characters(folder: Path, text: str) -> Path:
    """A directory of nanoGPT without val.bin, with a token for each character."""
    table = sorted(set(text))
    folder.mkdir()
    np.array([table.index(c) for c in text], np.uint16).tofile(folder / "train.bin")
    (folder / "meta.pkl").write_bytes(pickle.dumps({"itos": dict(enumerate(table))}))
    return folder


def refused(sentence: str, *sources: Path, **options: bool) -> None:
    with pytest.raises(InputError, match=f"^{re.escape(sentence)}"):
        data.load_with(*sources, **options)


def test_a_text_is_trained_on_as_a_whole(text: Path, other: Path) -> None:
    corpus = data.load_with(text, other)
    assert bytes(corpus.train[:]) == TEXT.encode()
    assert bytes(corpus.validation[:]) == OTHER.encode()
    held_out = data.load_with(text, None)
    assert held_out.checksum() == data.load(text).checksum()
    assert len(held_out.train) < len(corpus.train)


def test_tokens(tmp_path: Path, text: Path, other: Path) -> None:
    """The training part of prepared data stays, and so does the validation part of other data."""
    ours, theirs = shards(tmp_path / "a", text), shards(tmp_path / "b", other)
    both = data.load_with(ours, theirs, documents=True)
    assert (both.train[:] == data.load(ours).train[:]).all()
    assert (both.validation[:] == data.load(theirs).validation[:]).all()
    assert bytes(data.load_with(ours, other).validation[:]) == OTHER.encode()
    whole = data.load_with(text, data.EMBEDDED)
    assert (whole.validation[:] == data.load(data.EMBEDDED).validation[:]).all()
    refused(
        "`validation` must be a directory of `ddl prepare`, which knows where documents start,",
        ours, other, documents=True,
    )  # fmt: skip


def test_the_tokenizer_of_the_data_encodes_it(tmp_path: Path, text: Path, other: Path) -> None:
    corpus = data.load_with(characters(tmp_path / "characters", TEXT + OTHER), other)
    assert corpus.tokenizer.decode(corpus.validation[:].tolist()) == OTHER
    lacking = characters(tmp_path / "lacking", TEXT)
    refused(
        "`validation` must have characters that the tokenizer of `data` has, got"
        f" {other} with 'W;:'",
        lacking, other,
    )  # fmt: skip
    theirs = shards(tmp_path / "bytes", text)
    expected = f"`validation` must have the tokenizer of `{lacking}`, characters of"
    got = f"got {theirs} with another, bytes of 256"
    refused(f"{expected} {len(set(TEXT))} tokens, {got}", lacking, theirs)


def test_a_tokenizer_json_that_lacks_a_character(tmp_path: Path, other: Path) -> None:
    from tokenizers import Tokenizer, models

    kept = [c for c in sorted(set(OTHER)) if c != "W"]
    model = models.BPE(vocab={c: i for i, c in enumerate(kept)}, merges=[])
    Tokenizer(model).save(str(tmp_path / "tokenizer.json"))
    text = tmp_path / "without.txt"
    text.write_text(OTHER.replace("W", "w").replace("w", "t"))
    ours = shards(tmp_path / "a", text, tokenizer=str(tmp_path / "tokenizer.json"))
    sentence = "`validation` must have characters that the tokenizer of `data` has, got"
    refused(f"{sentence} {other} with 'W", ours, other)
    corpus = data.load_with(ours, text)
    assert corpus.tokenizer.decode(corpus.validation[:].tolist()).replace(" ", "") == (
        text.read_text().replace(" ", "")
    )


def test_what_cannot_be_read(tmp_path: Path, text: Path) -> None:
    nothing = tmp_path / "nothing"
    refused(f"`validation` must be a text file or a directory, got {nothing}, which", text, nothing)
    (tmp_path / "latin").write_bytes("Größe".encode("latin-1"))
    refused("`validation` must be UTF-8 text, got", text, tmp_path / "latin")
    (tmp_path / "short").write_text("a")
    with pytest.raises(InputError, match=r"^the validation part of `.*/short` must have at least"):
        data.load_with(text, tmp_path / "short").check(32, 256)


def test_from_the_command_to_a_resumed_run(
    tmp_path: Path, text: Path, other: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The loss is that of the text; a resumed run refuses another text, and none."""
    config = short(tmp_path, "additive", data=str(text), validation=str(other), eval_batches=0)
    with pytest.MonkeyPatch.context() as patch:
        stop_at(3, patch)
        train(config, quiet())
    again = replace(config, resume="auto")
    run = config.directory
    trained = f"`validation` must be what {run} was validated on, got `{other}` with another"
    for changes, sentence in (
        ({"text": OTHER.replace("rule", "RULE")}, f"{trained} content"),
        ({"validation": None}, f"`validation` must be as it was when {run} began, got the share"),
    ):
        other.write_text(changes.pop("text", OTHER))
        with pytest.raises(InputError, match=f"^{re.escape(sentence)}"):
            train(replace(again, **changes), quiet())
    other.write_text(OTHER)
    moved = other.rename(tmp_path / "moved.txt")
    assert train(replace(again, validation=str(moved)), quiet()).status == 0
    records = RunDirectory(run).metrics.read()
    last = next(r["validation_loss"] for r in records[::-1] if "validation_loss" in r)
    assert last == pytest.approx(mean_loss(run, OTHER.encode()), rel=1e-5)
    assert json.loads((run / "config.json").read_text())["validation"] == str(other)
    options = f"--data {text} --validation {tmp_path}/nothing --steps 1 --out {tmp_path}/new"
    assert main(["train", "tiny", *options.split()]) == 1
    assert capsys.readouterr().err.startswith("ddl train: `--validation` must be a text file or a")
    assert not (tmp_path / "new").exists()


def mean_loss(run: Path, text: bytes) -> float:
    """Of the run's model over the windows of a text, in plain PyTorch."""
    model, _ = load(run, "cpu")
    block = model.config.block_size
    windows = torch.tensor(list(text[: len(text) // block * block])).view(-1, block)
    with torch.no_grad():
        logits = model(windows[:, :-1]).logits
    return float(torch.nn.functional.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten()))


def test_without_validation_a_run_goes_on_without(
    tmp_path: Path, stopped: TrainConfig, other: Path
) -> None:
    sentence = f"`validation` must be left out when {stopped.directory} began, got `{other}`"
    with pytest.raises(InputError, match=f"^{re.escape(sentence)}"):
        train(replace(stopped, validation=str(other)), quiet())
