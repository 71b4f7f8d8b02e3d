"""`init_from`: a run that starts from the weights of another model."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from ddl import hf
from ddl.errors import InputError
from ddl.lab import exchange, load
from ddl.lab.cli import main
from ddl.lab.cli.initial import load_initial
from ddl.lab.config import TrainConfig, paper_code
from ddl.lab.train import train
from ddl.lab.train.checkpoint import read_manifest
from ddl.lab.train.initial import _require_tokens
from ddl.lab.train.runs import RunDirectory
from ddl.models import GPT, NanoGPT, NanoGPTConfig
from ddl.models.tokenizers import ByteTokenizer, CharTokenizer, FileTokenizer
from ddl.optim import learning_rate
from tests.support.hf_cases import model
from tests.support.prepare_cases import write_tokenizer
from tests.support.processes import together
from tests.support.train_cases import exchange_tokenizer, quiet, short, stop_at

SIZES = "--batch-size 4 --eval-batches 2 --eval-every 3 --log-every 1 --device cpu"


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> TrainConfig:
    """A run of 6 steps; no test may change it."""
    config = short(tmp_path_factory.mktemp("source"), "ddl-cc")
    train(config, quiet())
    return config


def going_on(source: TrainConfig, folder: Path, **changes: Any) -> TrainConfig:
    fields = {"init_from": str(source.directory), "steps": 3, "log_every": 1, "seed": 5}
    return replace(source, **({"out": folder / "run"} | fields | changes))


def validation_losses(config: TrainConfig) -> dict[int, float]:
    records = RunDirectory(config.directory).metrics.read()
    return {r["step"]: r["validation_loss"] for r in records if "validation_loss" in r}


def start(config: TrainConfig) -> None:
    train(config, quiet(), load=load_initial)


def exported(source: TrainConfig, kind: str, folder: Path) -> Path:
    if kind == "run":
        return source.directory
    model, tokenizer = load.load(source.directory, "cpu")
    if kind == "hugging face":
        hf.save(model, tokenizer, folder / "hf")
        return folder / "hf"
    exchange.import_checkpoint(source.directory, folder / "paper", reverse=True)
    return folder / "paper"


@pytest.mark.parametrize("kind", ["run", "hugging face", "paper"])
def test_the_loss_at_step_0_is_that_of_the_source(
    source: TrainConfig, kind: str, tmp_path: Path
) -> None:
    if kind == "paper":  # its format has these options alone
        source = paper_code(replace(source, out=tmp_path / "source", steps=1, eval_every=1))
        train(source, quiet())
    path = exported(source, kind, tmp_path)
    model = load.load(path, "cpu").model.config  # the papers' format names other equal options
    config = going_on(source, tmp_path, init_from=str(path), model=model)
    start(config)
    expected = validation_losses(source)[source.steps]
    assert validation_losses(config)[0] == pytest.approx(expected, rel=1e-6)
    stored = json.loads((config.directory / "config.json").read_text())
    assert stored["init_from"] == str(path)
    first = RunDirectory(config.directory).metrics.read()[1]
    assert first["step"] == 1
    assert first["lr"] == learning_rate(config.optim, 0, config.steps)  # its own schedule


def test_an_export_has_the_tokens_of_a_corpus_with_marked_documents(tmp_path: Path) -> None:
    """The corpus's text has the name of the token between documents, as words."""
    file = write_tokenizer(tmp_path / "tokenizer.json").read_text(encoding="utf-8")
    ours = FileTokenizer(file, 0)
    hf.save(model(vocab_size=400), ours, tmp_path / "hf")
    gpt, theirs = load.load(tmp_path / "hf", "cpu")
    assert isinstance(gpt, GPT)
    tokens = np.array([0, *ours.encode("the first"), 0, *ours.encode("the second")])
    corpus: Any = SimpleNamespace(tokenizer=ours, name="corpus", validation=tokens)
    _require_tokens("hf", gpt, theirs, corpus)
    corpus.tokenizer = FileTokenizer(write_tokenizer(tmp_path / "b.json", end="<s>").read_text())
    with pytest.raises(
        InputError, match=r"^`init_from` must be a model with the tokenizer of corp"
    ):
        _require_tokens("hf", gpt, theirs, corpus)


def test_it_goes_on_without_the_source(
    source: TrainConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stopped and resumed by its directory, and by `auto`, it is the uninterrupted run."""
    copy = tmp_path / "source"
    shutil.copytree(source.directory, copy)
    whole = going_on(source, tmp_path, init_from=str(copy))
    start(whole)
    part = replace(whole, out=tmp_path / "part")
    with monkeypatch.context() as patch:
        stop_at(2, patch)
        start(part)
    shutil.rmtree(copy)
    again = tmp_path / "again"
    shutil.copytree(part.directory, again)
    assert main(["train", "--resume", str(part.directory)]) == 0
    command = f"tiny {SIZES} --batch-size 8 --steps 3 --seed 5 --init-from {copy} --resume auto"
    assert main(["train", *command.split(), "--out", str(again)]) == 0
    for out in (part.directory, again):
        assert validation_losses(replace(part, out=out)) == validation_losses(whole)
        last = RunDirectory(out).checkpoint_path(3)
        assert read_manifest(last).files.keys()
        ours, theirs = load.load(out, "cpu").model, load.load(whole.directory, "cpu").model
        for name, tensor in ours.state_dict().items():
            torch.testing.assert_close(tensor, theirs.state_dict()[name], rtol=0, atol=0)


@pytest.mark.table(0)
@pytest.mark.parametrize("how", ["ddp", "fsdp2"])
def test_several_processes_start_from_it(source: TrainConfig, tmp_path: Path, how: str) -> None:
    config = going_on(source, tmp_path, batch_size=4, accumulation=2, parallel=how)
    alone = replace(config, out=tmp_path / "alone")
    start(alone)
    together(2, tmp_path / "out", lambda rank: train(config, quiet(), load=load_initial).status)
    expected = validation_losses(alone)
    assert set(expected) == {0, 3}
    assert validation_losses(config) == pytest.approx(expected, rel=1e-5)


def test_the_command_takes_the_models_options(
    source: TrainConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    command = ["train", "tiny", *SIZES.split(), "--steps", "1", "--out", str(out)]
    command += ["--init-from", str(source.directory)]
    as_in = f"as in {source.directory}, whose weights the run starts from, got"
    for option, sentence in (
        ("--model.hidden-size 64", f"`--model.hidden-size` must be 32, {as_in} 64"),
        ("--model.residual additive", f"`--model.residual` must be 'ddl-cc', {as_in} 'additive'"),
        ("--recipe paper-code", f"`--model.compress-parameterization` must be 'direct', {as_in} '"),
    ):
        assert main([*command, *option.split()]) == 1
        assert capsys.readouterr().err.startswith(f"ddl train: {sentence}")
        assert not out.exists()
    assert main([*command, "--model.hidden-size", "32"]) == 0
    assert "step 0: validation loss" in capsys.readouterr().out
    assert RunDirectory(out).steps() == [1]
    assert main([*command[:-1], str(tmp_path), "--overwrite"]) == 1
    assert capsys.readouterr().err.startswith("ddl train: `--init-from` must be a run directory")
    assert RunDirectory(out).steps() == [1]


def test_a_sweep(source: TrainConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "sweep.toml"
    text = f"""preset = "tiny"
out = "{tmp_path}/runs"
[options]
init_from = "{source.directory}"
model.hidden_size = 32
optim.lr = [1e-3, 1e-2]
steps = 1
eval_every = 1
eval_batches = 2
device = "cpu"
"""
    file.write_text(text)
    assert main(["sweep", str(file)]) == 0
    runs = sorted((tmp_path / "runs").glob("*-s1337"))
    assert len(runs) == 2
    for run in runs:
        losses = validation_losses(replace(source, out=run))
        assert losses[0] == pytest.approx(validation_losses(source)[6], rel=1e-6)
    file.write_text(text.replace("hidden_size = 32", "hidden_size = 64"))
    capsys.readouterr()
    assert main(["sweep", str(file), "--list"]) == 1
    expected = f"`options.model.hidden_size` must leave hidden_size at 32, as in {source.directory}"
    assert capsys.readouterr().err.startswith(f"ddl sweep: {file}: {expected}")
    file.write_text(text.replace(str(source.directory), str(tmp_path)))
    assert main(["sweep", str(file), "--list"]) == 1
    assert f"{file}: `options.init_from` must be a run directory" in capsys.readouterr().err


def test_other_tokens_are_refused(source: TrainConfig, tmp_path: Path) -> None:
    copy = tmp_path / "source"
    shutil.copytree(source.directory, copy)
    exchange_tokenizer(copy, CharTokenizer([chr(i) for i in range(256)]))
    config = going_on(source, tmp_path, init_from=str(copy))
    expected = (
        "`init_from` must be a model with the tokenizer of Python's documentation, bytes of 256"
        f" tokens, got {copy} with another, characters of 256"
    )
    with pytest.raises(InputError, match=f"^{re.escape(expected)}$"):
        start(config)
    model, _ = load.load(source.directory, "cpu")
    nothing = replace(config, init_from="nothing", model=replace(config.model, vocab_size=300))
    larger = type(model)(nothing.model)
    with pytest.raises(InputError, match=r"got nothing with 300 and without a tokenizer$"):
        train(nothing, quiet(), load=lambda _: (larger, None))
    with pytest.raises(InputError, match=r"^`init_from` must be left out in a call without"):
        train(config, quiet())
    with pytest.raises(InputError, match=r"^`num_layers` must be 2, as in .*, got 3$"):
        start(going_on(source, tmp_path, model=replace(source.model, num_layers=3)))
    assert not config.directory.exists()


def test_another_source_is_refused_when_a_run_goes_on(source: TrainConfig, tmp_path: Path) -> None:
    config = going_on(source, tmp_path, steps=1)
    start(config)
    other = replace(config, init_from=None, resume="auto")
    with pytest.raises(InputError, match=r"^`init_from` must be '.*', as in .*, got None"):
        train(other, quiet())


def test_nanogpt_is_neither_offered_nor_taken(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def said(path: Path) -> str:
        capsys.readouterr()
        assert main(["train", "tiny", "--init-from", str(path)]) == 1
        return capsys.readouterr().err

    offered = said(tmp_path / "nothing")
    assert "nanoGPT" not in offered
    assert " or a checkpoint of the paper's code, got " in offered
    config = NanoGPTConfig(vocab_size=256, block_size=16, n_layer=1, n_head=2, n_embd=32)
    hf.save(NanoGPT(config), ByteTokenizer(), tmp_path / "model")
    expected = f"got {tmp_path / 'model'} with nanoGPT's modules: go on in nanoGPT's own train.py\n"
    assert said(tmp_path / "model").endswith(expected)
