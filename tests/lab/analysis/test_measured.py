"""`ddl compare --data`: the losses of runs on a text, and their speeds."""

from __future__ import annotations

import json
import math
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from ddl import hf
from ddl.errors import InputError
from ddl.lab import data
from ddl.lab.analysis import measured, scoring
from ddl.lab.analysis.compare import compare, with_data
from ddl.lab.analysis.document import document
from ddl.lab.analysis.measured import measure
from ddl.lab.analysis.runs import Run
from ddl.lab.analysis.scoring import Score, encode, places, score_run
from ddl.lab.analysis.tables import markdown
from ddl.lab.cli import main
from ddl.lab.load import load
from ddl.lab.train import metrics, train
from ddl.models import NanoGPT, NanoGPTConfig
from ddl.models.tokenizers import ByteTokenizer, CharTokenizer
from tests.lab.analysis.cases import make_run, write_evaluation
from tests.lab.analysis.test_document import refuse
from tests.support.train_cases import exchange_tokenizer, quiet, short

TEXT = "The delta rule erases what it overwrites, é and ü too. " * 40


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two finished runs, "add" and "cc", on a text, and its validation part, validation.txt."""
    path = tmp_path_factory.mktemp("measured")
    text = path / "text.txt"
    text.write_text(TEXT, encoding="utf-8")
    for name, residual, precision in (("add", "additive", "float32"), ("cc", "ddl-cc", "bfloat16")):
        out = path / name
        config = short(out, residual, out=out, data=str(text), precision=precision, eval_batches=0)
        with pytest.MonkeyPatch.context() as patch:  # a CPU's peak in bfloat16 takes half a minute
            patch.setattr(metrics, "measured_peak", lambda precision: 1e9)
            train(replace(config, steps=2, eval_every=2), quiet())
    (path / "validation.txt").write_bytes(data.load(text).validation.tobytes())
    return path


@pytest.fixture(autouse=True)
def few_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measured, "SECONDS", 0.0)


def alone(path: Path) -> Run:
    return compare([path]).runs[0]


@pytest.mark.parametrize("name", ["add", "cc"])
def test_the_loss_on_the_validation_text_is_the_recorded_one(folder: Path, name: str) -> None:
    run = alone(folder / name)
    text = (folder / "validation.txt").read_text(encoding="utf-8")
    score, _ = score_run(run, text, lambda done, of: None)
    assert run.final is not None
    assert score.loss == pytest.approx(run.final.loss, rel=1e-6)
    assert score.step == 2
    windows = len(text.encode()) // 32
    assert (score.tokens, score.bytes) == (31 * windows, 31 * windows)
    assert score.bits_per_byte == pytest.approx(score.loss / math.log(2))


def test_an_exported_model_has_the_score_of_its_run(folder: Path, tmp_path: Path) -> None:
    """Its bytes are known, and the name of a special token in the text is words."""
    hf.save(*load(folder / "add", "cpu"), tmp_path / "hf")
    text = TEXT + "<|endoftext|>" * 20
    paths = (folder / "add", tmp_path / "hf")
    run, exported = (score_run(alone(path), text, lambda done, of: None)[0] for path in paths)
    assert exported == run._replace(step=None)


def test_all_of_the_text_is_scored_whatever_the_batches(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The mean over windows, computed one by one."""
    model, _ = load(folder / "add", "cpu")
    tokens = encode(TEXT, ByteTokenizer())
    windows = places(len(tokens), model.config)
    assert windows[-1].stop == len(tokens) // 32 * 32
    with torch.no_grad():
        losses = [
            model(idx, labels=idx).loss.item()
            for idx in (torch.tensor(tokens[w].astype(np.int64))[None] for w in windows)
        ]
    seen: list[tuple[int, int]] = []
    for most in (1, 3 * 32 * 256, 2**25):
        monkeypatch.setattr(scoring, "MOST_LOGITS", most)
        found = scoring.mean_loss(model, tokens, windows, lambda done, of: seen.append((done, of)))
        assert found == pytest.approx(sum(losses) / len(losses), rel=1e-6)
    assert seen[0] == (1, len(windows))
    assert seen.count((len(windows), len(windows))) == 3
    assert places(20, model.config) == [slice(0, 20)]  # a text shorter than a window


def test_an_unfit_run_does_not_lose_the_others(folder: Path, tmp_path: Path) -> None:
    unfit, damaged = tmp_path / "unfit", tmp_path / "damaged"
    for path in (unfit, damaged):
        shutil.copytree(folder / "add", path)
    table = CharTokenizer("The delta rule")
    exchange_tokenizer(unfit, table)
    (damaged / "checkpoints" / "step-00000002" / "manifest.json").write_text("{")
    write_evaluation(tmp_path / "hf", {0: {"piqa": 60.0}})
    (tmp_path / "hf" / "config.json").write_text('{"model_type": "llama"}')
    paths = [unfit, damaged, tmp_path / "hf", make_run(tmp_path / "begun", losses=[])]
    paths += [folder / "add", folder / "cc"]
    text = folder / "text.txt"
    found = with_data(compare(paths), text, quiet())
    assert found.measured is not None
    assert list(found.measured.scores) == ["add", "cc"]
    notes = [note for note in found.notes if note.startswith("Not measured: ")]
    assert notes[0] == (
        "Not measured: unfit, because its tokenizer has no tokens for 's', 'w', 'i' and 7 more."
    )
    assert notes[2] == "Not measured: hf, because it is no model of ddl."
    assert [note.split(",")[0] for note in notes[1::2]] == [
        *("Not measured: damaged", "Not measured: begun")
    ]
    made = json.loads(json.dumps(document(found), allow_nan=False), parse_constant=refuse)
    assert [run["data"] is None for run in made["runs"]] == [True] * 4 + [False] * 2
    last = made["runs"][-1]
    assert set(last["data"]) == {"step", "loss", "tokens", "bytes", "bits_per_byte"}
    assert set(last["inference"]) == {
        *("prefill_tokens_per_second", "prefill_ratio"),
        *("generated_tokens_per_second", "generated_ratio"),
    }
    assert made["data"] == {"path": str(text), "bytes": len(TEXT.encode())}
    assert (made["inference"]["prompt"], made["inference"]["tokens"]) == (16, 15)
    assert made["inference"]["rounds"] == 5
    assert last["inference"]["generated_ratio"]["low"] > 0
    assert made["runs"][-2]["inference"]["generated_ratio"]["ratio"] == 1
    tables = markdown(found)
    assert "Loss of the last checkpoints on text.txt" in tables
    assert "| unfit | – | – | – | – | – |" in tables
    lines = tables.split("Loss of the last checkpoints")[1].splitlines()
    row = next(line for line in lines if line.startswith("| cc | 2 |"))
    assert f"| {found.measured.scores['cc'].loss:.4f} |" in row
    assert row.endswith("% |")


def test_seeds_of_one_architecture_are_timed_once(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder / "add", tmp_path / "again")
    found = measure(
        compare([folder / "add", tmp_path / "again"]).runs, folder / "text.txt", quiet()
    )
    assert found.speeds["add"] == found.speeds["again"]


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (b"", "`data` must have at least two tokens, got "),
        (
            b"a",
            "`runs` must have one that can be measured on `data` .*, got add: the text has 1 of ",
        ),
        (b"\xff", "`data` must be a UTF-8 text, got "),
        (None, "`data` must be a UTF-8 text, got "),
    ],
)
def test_a_text_that_cannot_be_used(
    folder: Path, tmp_path: Path, content: bytes | None, sentence: str
) -> None:
    text = tmp_path / "x.txt"
    if content is not None:
        text.write_bytes(content)
    with pytest.raises(InputError, match=f"^{sentence}"):
        with_data(compare([folder / "add"]), text, quiet())
    with pytest.raises(InputError, match=r"^`data` must be a UTF-8 text, got "):
        with_data(compare([folder / "add"]), tmp_path, quiet())


def test_the_command(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["compare", str(folder / "add"), "--data", str(folder / "text.txt")]
    assert main(arguments) == 0
    out = capsys.readouterr().out
    assert "Loss of the last checkpoints on text.txt\n" in out
    assert "Generation on this machine: a prompt of 16 tokens, then 15 new ones" in out
    assert main([*arguments, "--json"]) == 0
    made = json.loads(capsys.readouterr().out, parse_constant=refuse)
    assert made["runs"][0]["data"]["step"] == 2


def test_bits_per_byte_of_a_score() -> None:
    assert Score(None, math.log(2), 10, 20).bits_per_byte == pytest.approx(0.5)
    assert Score(None, 1.0, 10, 0).bits_per_byte is None


def test_models_that_cannot_be_measured_do_not_blame_the_text(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = NanoGPTConfig(vocab_size=256, block_size=16, n_layer=1, n_head=2, n_embd=32)
    hf.save(NanoGPT(config), ByteTokenizer(), tmp_path / "imported")
    text = folder / "text.txt"
    capsys.readouterr()
    assert main(["compare", str(tmp_path / "imported"), "--data", str(text)]) == 1
    expected = f"`RUNS` must have one that can be measured on `--data` {text}, got imported: it has"
    expected += " nanoGPT's modules, which only `ddl eval` scores"
    assert capsys.readouterr().err == f"ddl compare: {expected}\n"
