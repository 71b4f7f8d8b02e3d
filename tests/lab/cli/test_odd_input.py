"""Odd paths, terminals, numbers and files: the commands do their work, or say why in a sentence."""

from __future__ import annotations

import json
import os
import re
import resource
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ddl.errors import InputError
from ddl.lab.cli import main
from ddl.lab.config import TrainConfig
from ddl.lab.config.stored import from_json, to_json
from ddl.lab.exchange import import_checkpoint
from ddl.lab.train import train
from tests.support.train_cases import quiet, short

SIZES = "--model.hidden-size 32 --model.block-size 32 --steps 2 --eval-batches 1 --device cpu"
TEXT = "The delta rule erases what it overwrites. " * 100
# Runs each argument as a command line of `ddl` and prints its exit status.
COMMANDS = """
import shlex, sys
from ddl.lab.cli import main
for line in sys.argv[1:]:
    try:
        status = main(shlex.split(line))
    except SystemExit as stop:  # after --help
        status = stop.code or 0
    print(f"\\nstatus {status}")
"""
NOT_UTF8 = os.fsdecode(b"\xff run")


def ddl(*arguments: object) -> int:
    return main([str(argument) for argument in arguments])


@pytest.mark.parametrize("name", ["a[b]", "[/bold]", "$x$", "50$", "a\\b", "_hidden", "ä ö", "-x"])
def test_names_that_are_markup_elsewhere(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """rich takes brackets for markup, matplotlib dollars for mathematics."""
    data, out = tmp_path / f"{name}.txt", tmp_path / name
    data.parent.mkdir(exist_ok=True)  # of [/bold]
    data.write_text(TEXT)
    assert ddl("train", "tiny", *SIZES.split(), "--data", data, "--out", out) == 0
    said = capsys.readouterr().out.replace("\n", "")
    assert str(data) in said
    assert f"`ddl sample {out}`" in said
    assert (out / "loss.png").stat().st_size > 0
    assert ddl("train", "--resume", out) == 0
    assert ddl("sample", out, "--tokens", 2, "--prompt", "The") == 0


def test_a_prompt_that_is_not_utf8(models: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert ddl("sample", models / "run", "--prompt", NOT_UTF8) == 1
    expected = "ddl sample: `--prompt` must be UTF-8 text, got '\\udcff run'\n"
    assert capsys.readouterr().err == expected


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("models")
    train(short(root, "additive", steps=1), quiet())
    import_checkpoint(root / "run", root / "theirs", reverse=True)
    shutil.move(root / "theirs/pytorch_model.bin", root / "theirs.pt")
    (root / "text.txt").write_text(TEXT)
    return root


@pytest.mark.parametrize(
    "command",
    [
        *("sample LONG", "inspect run --data LONG", "export run --hf LONG", "import LONG out"),
        *("train tiny --data LONG --out out", "train tiny --validation LONG --out out"),
        *("train tiny --out LONG", "prepare LONG --tokenizer bytes --out out", "report LONG"),
        *("prepare text.txt --tokenizer bytes --out LONG", "bench ops --out LONG"),
        *("prepare text.txt --tokenizer LONG --out out", "compare run run --plot LONG"),
        *("eval run --tasks LONG", "eval run --tasks x --include-path LONG"),
    ],
)
def test_a_name_that_is_too_long(
    command: str,
    models: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    shutil.copytree(models, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    assert main(["a" * 300 if word == "LONG" else word for word in command.split()]) == 1
    said = capsys.readouterr().err
    assert said.splitlines()[-1].startswith(f"ddl {command.split()[0]}: `")
    assert "a" * 300 in said


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ("--model.block-size 1", "`--model.block-size` must be at least 2 for training, got 1"),
        ("--seed 9223372036854775808", "`--seed` must be at most 9223372036854775807, got 9223372"),
        ("--model.num-layers 1000000000", "`--model.num-layers` must be at most 16384, got 100000"),
        ("--batch-size 9000000000", "`--batch-size` must be at most 2147483648, got 9000000000"),
        ("--accumulation 99999999999", "`--accumulation` must be at most 2147483648, got 99999999"),
        ("--eval-batches 99999999999", "`--eval-batches` must be at most 2147483648, got 99999999"),
        ("--optim.weight-decay inf", "`--optim.weight-decay` must be a finite number, got inf"),
        ("--optim.clip nan", "`--optim.clip` must be a finite number, got nan"),
        ("--save-minutes 0", "`--save-minutes` must be a positive finite number, got 0.0"),
        (
            "--model.block-size 900000000",
            "the training part of Python's documentation must have at least one block of 900000000",
        ),
        *(
            (option, "`--batch-size` must fit into this memory with the sizes of the model")
            for option in (
                "--model.hidden-size 1000000000000",
                "--model.vocab-size 100000000000000000",
                "--model.head-size 1000000000000000000",
                "--model.value-channels 1000000000000",
                "--model.residual ddl-tc --model.compress-kernel-size 10000000000",
            )
        ),
    ],
)
def test_numbers_that_cannot_be(
    options: str, sentence: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "runs" / "new"
    command = ["train", "tiny", "--device", "cpu", "--out", out, *options.split()]
    assert ddl(*command) == 1
    error = capsys.readouterr().err
    assert error.startswith(f"ddl train: {sentence}")
    assert len(error.splitlines()) == 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"steps": "many"}, "`steps` must be an integer of at least 1, got 'many'"),
        ({"steps": 10**30}, "`steps` must be at most 2147483648, got 1000000000000000000000000000"),
        ({"batch_size": 1.5}, "`batch_size` must be an integer of at least 1, got 1.5"),
        ({"compile": 1}, "`compile` must be True or False, got 1"),
        ({"data": 7}, "`data` must be a path as text, got 7"),
        ({"out": [1]}, "`out` must be a path, got (1,)"),
        ({"optim": {"lr": 10**400}}, "`lr` must be a positive finite number, got 1000000000000"),
        ({"optim": {"betas": {"a": 1}}}, "`betas` must be two numbers in [0, 1), got {'a': 1}"),
        ({"model": {"num_layers": 10**30}}, "`num_layers` must be at most 16384, got 10000000000"),
        (
            {"model": {"hidden_size": "8"}},
            "`hidden_size` must be an integer of at least 1, got '8'",
        ),
        ({"model": {"eps_k": []}}, "`eps_k` must be a positive finite number, got ()"),
        ({"model": []}, "`config.json` must hold a TrainConfig, got list instead of an object"),
    ],
)
def test_a_config_with_wrong_types(changes: dict[str, Any], sentence: str, tmp_path: Path) -> None:
    values = json.loads(to_json(short(tmp_path)))
    for name, value in changes.items():
        values[name] = values[name] | value if isinstance(value, dict) else value
    with pytest.raises(InputError) as refused:
        from_json(TrainConfig, json.dumps(values))
    assert str(refused.value).startswith(sentence)


# --- terminals ------------------------------------------------------------------------------------


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="the system has no /dev/full")
def test_a_full_disk_behind_the_output(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    sentence = "ddl: the output must be writable, got: No space left on device\n"
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(  # it fails when the process flushes its output
            [sys.executable, "-m", "ddl", "--help"],
            stdout=full, stderr=subprocess.PIPE, text=True,
            env={**os.environ, "PYTHONUNBUFFERED": ""},
        )  # fmt: skip
        assert (done.returncode, done.stderr) == (1, sentence)
        with monkeypatch.context() as patch:
            patch.setattr(sys, "stdout", full)
            assert ddl("train", "tiny", *SIZES.split(), "--out", out) == 1
    assert capsys.readouterr().err == sentence
    assert not out.exists()


def test_an_output_that_may_grow_no_more(tmp_path: Path) -> None:
    with (tmp_path / "out").open("w") as out:
        done = subprocess.run(
            [sys.executable, "-m", "ddl", "--help"],
            stdout=out, stderr=subprocess.PIPE, text=True,
            preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100)),
        )  # fmt: skip
    assert (done.returncode, done.stderr) == (
        1,
        "ddl: the output must be writable, got: File too large\n",
    )


def test_an_ascii_terminal(tmp_path: Path) -> None:
    """One process runs all commands, because each process would import torch."""
    data, out = tmp_path / "größe.txt", tmp_path / "läuft"
    data.write_text("Größe und Länge. " * 200)
    lines = [
        ["--help"],
        ["train", "--help"],
        ["train", "tiny", *SIZES.split(), "--data", str(data), "--out", str(out)],
        ["sample", str(out), "--tokens", "20", "--device", "cpu"],
    ]
    ascii_only = {"PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0", "LC_ALL": "C"}
    done = subprocess.run(
        [sys.executable, "-c", COMMANDS, *map(shlex.join, lines)],
        capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"} | ascii_only,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.isascii()
    assert re.findall(r"^status (\w+)$", done.stdout, flags=re.MULTILINE) == ["0"] * 4
