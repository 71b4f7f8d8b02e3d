"""Weights that are not finite: every command that reads a model refuses them in one sentence."""

from __future__ import annotations

import json
import math
import re
import shutil
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from ddl.errors import InputError
from ddl.files import checksum
from ddl.lab.cli import main
from ddl.lab.exchange import export_run, import_checkpoint
from ddl.lab.load import load
from ddl.lab.train import checkpoint, train
from ddl.lab.train.runs import RunDirectory, load_config
from tests.support.eval_cases import datasets_in
from tests.support.eval_reference import TASKS
from tests.support.train_cases import quiet, short

TEXT = "".join(f"Rewrite {i} erases what it overwrites.\n" for i in range(100))
EVAL = f"--tasks local_arc --include-path {TASKS} --device cpu --out scores.json"
STEP = "run/checkpoints/step-00000002"
# The path with the weights, which the sentence names, and the commands that read them.
CASES = {
    STEP: (
        "sample run --device cpu",
        "export run --hf out",
        "inspect run --data text.txt --device cpu",
        f"eval run {EVAL}",
        "import run out --reverse",
        "train tiny --init-from run --data text.txt --out out --device cpu",
        "train --resume run",
    ),
    "old/model.safetensors": ("sample old --device cpu", "export old --hf out"),
    "hf": (
        "sample hf --device cpu",
        "export hf --hf out",
        "import hf out --reverse",
        f"eval hf {EVAL}",
        "train tiny --init-from hf --data text.txt --out out --device cpu",
    ),
    "other": (f"eval other {EVAL}",),
    "theirs/pytorch_model.bin": ("sample theirs --device cpu", "import theirs out"),
}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run, one with its weights alone, and exports of it; no test may change them."""
    transformers = pytest.importorskip("transformers")
    root = tmp_path_factory.mktemp("files")
    (root / "text.txt").write_text(TEXT)
    train(replace(short(root, "additive", steps=2), data=str(root / "text.txt")), quiet())
    export_run(root / "run", root / "hf")
    import_checkpoint(root / "run", root / "theirs", reverse=True)
    shutil.copytree(root / "run", root / "old")
    shutil.rmtree(root / "old/checkpoints")
    RunDirectory(root / "old").save(load(root / "run", "cpu").model)
    shutil.copytree(root / "hf", root / "other")
    (root / "other/config.json").unlink()
    sizes = {"n_embd": 8, "n_layer": 1, "n_head": 1, "vocab_size": 256}
    transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes)).save_pretrained(root / "other")
    return root


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with datasets_in(tmp_path_factory.mktemp("datasets")) as path:
        yield path


def spoil(path: Path, number: float, part: str = checkpoint.MODEL) -> str:
    """Put a number into a tensor, and the file's checksum into the manifest; return its name."""
    in_run = (path / checkpoint.MANIFEST).exists()
    folder = path / part if in_run else path
    (file,) = [path] if path.is_file() else folder.glob("*.safetensors")
    tensors = torch.load(file) if file.suffix == ".bin" else load_file(file)
    name = max(name for name, tensor in tensors.items() if tensor.is_floating_point())
    tensors[name].view(-1)[-1] = number
    if file.suffix == ".bin":
        torch.save(tensors, file)
    else:
        with safe_open(file, "pt") as opened:
            described = opened.metadata()
        save_file(tensors, file, described)
    if in_run:
        manifest = checkpoint.read_manifest(path)
        manifest.files[f"{part}/{file.name}"] = [file.stat().st_size, checksum(file)]
        (path / checkpoint.MANIFEST).write_text(json.dumps(asdict(manifest)))
    return name


@pytest.mark.parametrize(
    ("path", "command"), [(path, command) for path in CASES for command in CASES[path]]
)
def test_a_command_refuses_them(
    path: str,
    command: str,
    files: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    shutil.copytree(files, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    spoil(tmp_path / path, math.nan if "sample" in command else -math.inf)
    before = {p: p.stat().st_mtime_ns for p in tmp_path.rglob("*")}
    capsys.readouterr()
    assert main(command.split()) == 1
    said = capsys.readouterr().err
    *bars, sentence = said.splitlines()
    begin = f"ddl {command.split()[0]}: `{path}` must hold finite weights, got NaN or infinity in "
    assert sentence.startswith(begin)
    assert not any("ddl" in bar for bar in bars)  # of libraries
    assert {p: p.stat().st_mtime_ns for p in tmp_path.rglob("*")} == before


def test_a_comparison_names_the_run(
    files: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(files, tmp_path, dirs_exist_ok=True)
    spoil(tmp_path / STEP, math.nan)
    runs = [str(tmp_path / name) for name in ("run", "old")]
    assert main(["compare", *runs, "--data", str(tmp_path / "text.txt"), "--json"]) == 0
    out = capsys.readouterr().out
    assert "must hold finite weights, got NaN or infinity in " in out
    assert [run["data"] is None for run in json.loads(out)["runs"]] == [True, False]


def test_an_optimizer_with_nan(files: Path, tmp_path: Path) -> None:
    """Infinity may be a square that overflowed; NaN would reach the weights with the next step."""
    shutil.copytree(files, tmp_path, dirs_exist_ok=True)
    config = replace(load_config(tmp_path / "run"), out=None, resume=str(tmp_path / "run"))
    name = spoil(tmp_path / STEP, math.inf, checkpoint.TRAINING)
    train(config, quiet())
    spoil(tmp_path / STEP, math.nan, checkpoint.TRAINING)
    path = re.escape(str(tmp_path / STEP))
    got = f"of a run that has not diverged, got NaN in {re.escape(name)}$"
    with pytest.raises(InputError, match=f"^`{path}` must hold the state {got}"):
        train(config, quiet())
