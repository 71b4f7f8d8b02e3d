"""`ddl sweep`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from ddl.lab.cli import main
from ddl.lab.train import Step, Trainer

TEXT = """
preset = "tiny"
out = "runs"
seeds = [1, 2]
variants.additive.model.residual = "additive"
variants.delta.model.residual = "ddl"
[options]
model = { block_size = 32, hidden_size = 32 }
steps = 4
eval_every = 2
eval_batches = 2
device = "cpu"
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current directory, with a sweep.toml, in a terminal of 80 columns."""
    (tmp_path / "sweep.toml").write_text(TEXT)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    return tmp_path


def sweep(*arguments: str) -> int:
    return main(["sweep", "sweep.toml", *arguments])


@pytest.mark.exhaustive
def test_from_the_file_to_the_comparison(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert sweep("--count") == 0
    assert capsys.readouterr().out == "4\n"
    assert sweep("--index", "2") == 0
    assert "speed ratio" not in capsys.readouterr().out  # one task of an array compares nothing
    assert sweep("--list") == 0
    assert capsys.readouterr().out.splitlines() == [
        "   0  additive-s1  step 0 of 4",
        "   1  delta-s1     step 0 of 4",
        "   2  additive-s2  finished",
        "   3  delta-s2     step 0 of 4",
    ]
    assert sweep() == 0
    text = capsys.readouterr().out
    for piece in (
        "1 run of 4 finished before",
        "Run 4 of 4: delta-s2",
        "additive-s1",
        "perplexity",
    ):
        assert piece in text
    assert "difference from that of additive, seed by seed" in text
    assert "Loss curves: runs/loss.png" in text
    assert (folder / "runs/loss.png").read_bytes().startswith(b"\x89PNG")
    assert main(["compare", "runs", "--paired"]) == 0
    shown = capsys.readouterr().out.strip()
    assert shown in text
    assert sweep() == 0
    assert shown in capsys.readouterr().out


def test_a_failure_is_said_at_the_end_and_is_the_status(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    original = Trainer.step

    def step(self: Trainer, *flags: Any) -> Any:
        if self.config.seed == 2 and self.config.model.residual == "ddl":
            return Step(torch.tensor(float("nan")), torch.tensor(1.0))
        return original(self, *flags)

    monkeypatch.setattr(Trainer, "step", step)
    assert sweep() == 1
    captured = capsys.readouterr()
    assert captured.err.startswith("ddl sweep: delta-s2: the loss is not finite at step ")
    assert len(captured.err.splitlines()) == 1
    assert "1 run of 4 failed: delta-s2" in captured.out
    assert "No interval with one seed: delta." in captured.out


def test_a_directory_that_cannot_be_listed_is_a_state(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "runs" / "delta-s1").mkdir(parents=True)
    (folder / "runs/delta-s1/config.json").write_text('{"model": {"residual": "ddl", "x": 1}}')
    assert sweep("--list") == 0
    line = capsys.readouterr().out.splitlines()[1]
    assert line.startswith("   1  delta-s1     `config.json` must hold a TrainConfig, got the unk")


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ("--index 4", "`--index` must be from 0 to 3, the runs of the sweep, got 4"),
        ("--index -1", "`--index` must be an integer of at least 0, got -1"),
        ("--count --list", "`--list` must be left out with `--count`, got True"),
        ("--index 0 --list", "`--index` must be left out with `--count` and `--list`, got 0"),
    ],
)
def test_a_sentence(
    arguments: str, sentence: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert sweep(*arguments.split()) == 1
    assert capsys.readouterr().err == f"ddl sweep: {sentence}\n"
    assert os.listdir(folder) == ["sweep.toml"]


def test_a_sentence_names_the_key_in_the_file(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "sweep.toml").write_text(TEXT + "optim.lr = [1e-3, 0]\n")
    assert sweep("--count") == 1
    expected = "sweep.toml: `options.optim.lr` must be a positive finite number, got 0.0"
    assert capsys.readouterr().err == f"ddl sweep: {expected}\n"
    assert main(["sweep", "nothing.toml"]) == 1
    assert "`FILE` must be readable, got nothing.toml: No such file" in capsys.readouterr().err
