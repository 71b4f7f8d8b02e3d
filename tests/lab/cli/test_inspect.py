"""`ddl inspect` as users call it."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest

pytest.importorskip("transformers")

import ddl.hf
from ddl.lab.cli import main
from ddl.lab.train.runs import RunDirectory
from ddl.models import NanoGPT, NanoGPTConfig
from ddl.models.tokenizers import ByteTokenizer, CharTokenizer

SIZES = ["--steps", "4", "--eval-every", "4", "--record-every", "2", "--model.block-size", "32"]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("runs") / "run"
    assert main(["train", "tiny", *SIZES, "--out", str(path), "--device", "cpu"]) == 0
    return path


@pytest.fixture
def run(trained: Path, tmp_path: Path) -> Path:
    return shutil.copytree(trained, tmp_path / "run")


def test_a_run(run: Path, capfd: pytest.CaptureFixture[str]) -> None:
    prompt = "The statement "
    assert main(["inspect", str(run), "--tokens", "100", "--prompt", prompt]) == 0
    out = capfd.readouterr().out
    assert "means over 96 tokens" in out  # in whole windows
    assert re.search(r"^ 1 mlp +\d\.\d\d ±\d", out, re.MULTILINE)
    assert "Of the embedding" in out
    header = next(line for line in out.splitlines() if "before" in line)
    explained = re.findall(r"^(before, after|shrinks|erased|most by): .+\.$", out, re.MULTILINE)
    assert header.split() == ["sublayer", *" ".join(explained).replace(",", "").split()]
    assert "Measured on the held-out part of Python's documentation." in out
    assert f"wrote {run / 'inspect' / 'depth.png'}" in out.splitlines()
    assert re.search(r"^ embedding +'.*' \d+%", out, re.MULTILINE)
    assert max(map(len, out.replace(str(run), "").splitlines())) <= 80
    assert {path.name for path in (run / "inspect").iterdir()} == {
        *("depth.png", "training.png", "inspection.json")
    }
    main(["inspect", str(run), "--tokens", "100", "--prompt", prompt, "--json"])
    printed = json.loads(capfd.readouterr().out)  # one document and nothing else
    assert printed == json.loads((run / "inspect" / "inspection.json").read_text())
    assert printed["text"] == "the held-out part of Python's documentation"
    assert [row["after"] for row in printed["lens"]] == [
        "embedding",
        *(f"trunk.residuals.{i}" for i in range(4)),
    ]
    assert all(len(row["tokens"]) == 3 and len(row["channels"]) == 4 for row in printed["lens"])


def test_other_text_and_another_folder(run: Path, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("Sphinx of black quartz, judge my vow. " * 20)
    options = ["--data", str(text), "--tokens", "64", "--out", str(tmp_path / "new" / "pictures")]
    assert main(["inspect", str(run), *options]) == 0
    assert not (run / "inspect").exists()
    written = json.loads((tmp_path / "new" / "pictures" / "inspection.json").read_text())
    assert (written["text"], written["tokens"]) == (str(text), 64)
    assert "lens" not in written


def test_a_checkpoint_and_an_exported_model(run: Path, tmp_path: Path) -> None:
    """The exported model is measured on the same text, and gives the same figures."""
    exported = tmp_path / "exported"
    assert main(["export", str(run), "--hf", str(exported)]) == 0
    for path in (run, exported):
        assert main(["inspect", str(path), "--tokens", "64"]) == 0
    assert main(["inspect", str(run), "--tokens", "64", "--checkpoint", "3"]) == 1
    of_run, of_exported = (
        json.loads((path / "inspect" / "inspection.json").read_text()) for path in (run, exported)
    )
    assert of_exported["text"] == of_run["text"]
    assert of_exported["shares"] == pytest.approx(of_run["shares"], abs=1e-6)
    assert not (exported / "inspect" / "training.png").exists()


def test_a_new_run_in_the_directory_drops_the_pictures(run: Path) -> None:
    main(["inspect", str(run), "--tokens", "32"])
    options = ["--out", str(run), "--device", "cpu", "--overwrite"]
    assert main(["train", "tiny", *SIZES, *options]) == 0
    assert not (run / "inspect").exists()
    assert len(RunDirectory(run).recordings.read()) == 2


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--tokens", "0"], "`--tokens` must be "),
        (["--prompt", ""], "`--prompt` must have at least one token, got ''"),
        (["--data", "{folder}/none.txt"], "`--data` must be a UTF-8 text or a directory, got "),
        (["--data", "{folder}/empty.txt"], "`--data` must have at least one token, got "),
        (["--data", "{folder}/latin.txt"], "`--data` must be a UTF-8 text or a directory, got "),
        (["--out", "{folder}/empty.txt"], "`--out` must be "),
    ],
)
def test_refusals(
    options: list[str], sentence: str, run: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "empty.txt").touch()
    (tmp_path / "latin.txt").write_bytes("né".encode("latin-1"))
    filled = [option.replace("{folder}", str(tmp_path)) for option in options]
    assert main(["inspect", str(run), *filled]) in (1, 2)
    error = capfd.readouterr().err
    assert sentence in " ".join(error.split())
    assert "Traceback" not in error
    assert not (run / "inspect").exists()


def test_a_model_without_rewrites(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "plain"
    options = ["--model.residual", "additive", "--out", str(path), "--device", "cpu"]
    assert main(["train", "tiny", *SIZES, *options]) == 0
    capfd.readouterr()
    assert main(["inspect", str(path), "--tokens", "100", "--prompt", "The statement "]) == 0
    out = capfd.readouterr().out
    assert re.search(r"^ sublayer +write +\|X\| +cosine +share *$", out, re.MULTILINE)
    assert re.search(r"^The embedding is \d+% of the last state\.$", out, re.MULTILINE)
    assert re.search(r"^ 1 mlp +'.*' \d+%", out, re.MULTILINE)  # the lens
    assert "β" not in out
    assert "channel" not in out
    assert {file.name for file in (path / "inspect").iterdir()} == {
        *("depth.png", "training.png", "inspection.json")
    }
    written = json.loads((path / "inspect" / "inspection.json").read_text())
    assert {"effective_rank", "singular_values", "survival"}.isdisjoint(written)
    assert sum(written["shares"]) == pytest.approx(1)
    last = json.loads((path / "recordings.jsonl").read_text().splitlines()[-1])
    assert last["sublayers"][0].keys() == written["sublayers"][0].keys()


def test_a_model_of_nanogpt_without_rewrites(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = NanoGPT(NanoGPTConfig(vocab_size=256, block_size=16, n_layer=1, n_head=2, n_embd=32))
    ddl.hf.save(model, ByteTokenizer(), tmp_path / "model")
    capsys.readouterr()  # the bar of the other library
    assert main(["inspect", str(tmp_path / "model")]) == 1
    expected = "ddl inspect: `RUN` must be a model with rewrites, or one that `ddl train` made, got"
    assert capsys.readouterr().err.startswith(expected)


def test_a_text_that_the_characters_do_not_spell(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """An imported model has no data of its own, and Python's documentation has other characters."""
    delta = {"value_channels": 2}
    sizes = {"vocab_size": 27, "block_size": 16, "n_layer": 1, "n_head": 2, "n_embd": 32}
    table = CharTokenizer(" abcdefghijklmnopqrstuvwxyz")
    ddl.hf.save(NanoGPT(NanoGPTConfig(**sizes, delta=delta)), table, tmp_path / "model")
    (tmp_path / "text").write_text("what The model has not")
    expected = "`--data` must consist of the 27 characters that the model was trained on, got"
    got = {(): "nothing, which means Python's documentation, with 'T'"}
    got[("--data", str(tmp_path / "text"))] = f"{tmp_path / 'text'} with 'T'"
    for options, came in got.items():
        capsys.readouterr()
        assert main(["inspect", str(tmp_path / "model"), *options]) == 1
        assert capsys.readouterr().err == f"ddl inspect: {expected} {came}\n"
