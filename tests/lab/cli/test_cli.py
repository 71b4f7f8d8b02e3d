"""The `ddl` command: messages, exit statuses, help, and the modules that it imports."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

import ddl
from ddl.lab import cli
from ddl.lab.cli.main import _flags
from ddl.lab.config import SampleConfig, TrainConfig
from ddl.lab.train import train
from ddl.models.config import STREAMS
from ddl.options import quoted
from tests.support.train_cases import quiet, short

ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1", "COLUMNS": "100"}


def run(*args: str) -> subprocess.CompletedProcess[str]:
    """Run `ddl args` in a new process."""
    command = [sys.executable, "-m", "ddl", *args]
    return subprocess.run(command, capture_output=True, text=True, env=ENVIRONMENT)


def test_training_and_sampling_in_processes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = str(tmp_path / "run")
    sizes = ["--model.hidden-size", "32", "--model.block-size", "32", "--steps", "3"]
    trained = run("train", "tiny", *sizes, "--device", "cpu", "--out", out)
    assert trained.returncode == 0, trained.stderr
    assert "validation loss" in trained.stdout
    assert cli.main(["train", "tiny", *sizes, "--device", "cpu", "--out", out]) == 1
    error = capsys.readouterr().err
    assert error.startswith("ddl train: `--out` must be a directory without a run, got ")
    assert len(error.splitlines()) == 1
    sampled = run("sample", out, "--prompt", "class", "--tokens", "5", "--device", "cpu")
    assert sampled.returncode == 0, sampled.stderr
    assert sampled.stdout.startswith("class")


def test_sampling_among_the_likeliest(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A nucleus of nearly no probability holds the likeliest token alone."""
    run = train(short(tmp_path, "additive", steps=1), quiet()).run.path
    texts = []
    for options in ("--temperature 0", "--top-p 1e-9", "--top-k None --top-p 1e-9", "--top-p 1"):
        line = ["sample", str(run), "--tokens", "40", "--device", "cpu", *options.split()]
        assert cli.main(line) == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1] == texts[2] != texts[3]


@pytest.mark.parametrize(
    ("args", "sentence"),
    [
        ("train huge", "`preset` must be one of tiny, demo, small, medium, got 'huge'"),
        ("train --steps 3 tiny", "`preset` must come first, as in `ddl train tiny`, got it later"),
        ("train tiny demo", "`preset` must come first, as in `ddl train demo`, got it later"),
        ("train --steps -3", "`--steps` must be an integer of at least 1, got -3"),
        # as the value of an option, a preset's name is no preset
        (
            "train --out tiny --model.num-layers 0",
            "`--model.num-layers` must be an integer of at least 1, got 0",
        ),
        ("train --optim.lr 0", "`--optim.lr` must be a positive finite number, got 0.0"),
        (
            "train --model.gate-hidden 64",
            '`--model.gate-hidden` must be left at 128 unless --model.gate="mlp", got 64',
        ),
        (
            "train --model.vocab-size 100",
            "`--model.vocab-size` must be at least 256 for Python's documentation, got 100",
        ),
        (
            "train small --device cpu",
            "`--data` must name a UTF-8 text file, a directory of `ddl prepare`, or one with"
            " train.bin and val.bin, got nothing",
        ),
        (
            "sample /nowhere",
            "`RUN` must be a run directory of `ddl train`, a Hugging Face directory with a model of"
            " ddl or a checkpoint of nanoGPT or of the paper's code, got /nowhere: No such file or"
            " directory",
        ),
        ("sample /nowhere --top-p 0", "`--top-p` must be above 0 and at most 1, got 0.0"),
        (
            "prepare --tokenizer bytes",
            "`INPUTS` must name at least one file or directory, got nothing",
        ),
        (
            "prepare /nowhere --tokenizer bytes",
            "`--out` must name the directory to write, as in `--out data/notes`, got nothing",
        ),
        (
            "prepare a --out b",
            "`--tokenizer` must name bytes, gpt2 or a tokenizer.json, as in `--tokenizer bytes`,"
            " got nothing",
        ),
        # perhaps `b` was meant for it
        (
            "export a b",
            "`--hf` must name the directory to write, as in `--hf exported`, got nothing",
        ),
        (
            "eval a b --limit 3",
            "`ddl eval` must be called with MODEL and options alone, got 'b' besides: call it once"
            " for each",
        ),
        (
            "import a b c",
            "`ddl import` must be called with SRC OUT and options alone, got 'c' besides: call it"
            " once for each",
        ),
        (
            "prepare /nowhere --out /tmp/out --tokenizer bytes",
            "`INPUTS` must be readable files, got /nowhere: No such file or directory",
        ),
        (
            "prepare a --out b --tokenizer bytes --validation 0",
            "`--validation` must be above 0 and at most 1, got 0.0",
        ),
        ("sample /nowhere --tokens -1", "`--tokens` must be an integer of at least 0, got -1"),
        (
            "train tiny --model.residual hc --model.rewrites 2",
            "`--model.rewrites` must be left at 1 unless "
            f"--model.residual={quoted(STREAMS)}, got 2",
        ),
        ("demo --residual additive", "`--residual` must be another than additive, got 'additive'"),
    ],
)
def test_one_sentence_that_names_the_option(
    args: str, sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    command, *rest = args.split()
    assert cli.main([command, *rest]) == 1
    captured = capsys.readouterr()
    assert captured.err == f"ddl {command}: {sentence}\n"
    assert captured.out == ""


@pytest.mark.parametrize(
    ("args", "said"),
    [
        ("train --stepz 3", "Unrecognized options: --stepz"),
        ("train tiny --device gpu", "invalid choice 'gpu' for argument '--device'"),
        ("train --model.gate-hidden x", "Error parsing --model.gate-hidden"),
        ("sample", "Missing from ddl sample"),
    ],
)
def test_what_tyro_finds_it_says_itself(
    args: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stop:
        cli.main(args.split())
    assert stop.value.code == 2
    assert said in unboxed(capsys.readouterr().err)


def unboxed(text: str) -> str:
    return " ".join(text.replace("│", " ").split())


def test_usage(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert cli.main(["frobnicate"]) == 2
    known = ", ".join(cli.COMMANDS)
    expected = f"ddl: the command must be one of {known}, got 'frobnicate'\n"
    assert capsys.readouterr().err == expected
    assert cli.main([]) == 2
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out.split()[-1] == ddl.__version__
    assert cli.main(["--help"]) == 0
    printed = capsys.readouterr().out
    assert "ddl sample RUN" in printed
    assert "ddl eval RUN" in printed
    monkeypatch.setitem(sys.modules, "tyro", None)
    assert cli.main(["train"]) == 1
    expected = "ddl train: `ddl train` needs the `train` extra: pip install 'ddl-rs[train]'\n"
    assert capsys.readouterr().err == expected


@pytest.mark.parametrize(
    ("args", "program"), [("train", "ddl train [PRESET]"), ("train small", "ddl train small")]
)
def test_help_teaches(args: str, program: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        cli.main([*args.split(), "--help"])
    assert stop.value.code in (0, None)
    text = unboxed(capsys.readouterr().out)
    assert text.startswith(f"usage: {program} [-h]")
    for piece in ("--model.residual", "--optim.warmup-steps", "--data", "papers' recipe"):
        assert piece in text
    assert re.search(r"--model.erase .{,40}A rewrite erases", text)
    assert "arXiv 2601.00417" in text
    assert not re.search(r"\[P\d\]", text)


@pytest.mark.parametrize("command", cli.COMMANDS)
def test_examples_in_help_can_be_copied(
    command: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """tyro joins lines that follow each other; an example has to stay on a line of its own."""
    monkeypatch.setenv("COLUMNS", "200")
    module = import_module(f"ddl.lab.cli.{command.replace('import', 'import_')}")
    examples = [line for line in module.HELP.splitlines() if line.startswith("ddl ")]
    with pytest.raises(SystemExit):
        cli.main([command, "--help"])
    before_options = capsys.readouterr().out.split("╭")[0]
    assert examples
    assert {example.strip() for example in examples} <= set(before_options.splitlines())
    assert "\n\n\n" not in before_options


def test_every_field_has_its_flag() -> None:
    flags = _flags(TrainConfig)
    assert flags["num_layers"] == "--model.num-layers"
    assert flags["lr"] == "--optim.lr"
    assert flags["data"] == "--data"
    assert flags["model.num_layers"] == "--model.num-layers"
    assert _flags(SampleConfig)["run"] == "RUN"


@pytest.mark.parametrize("command", cli.COMMANDS)
def test_sentences_name_arguments_as_the_help_does(
    command: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    with pytest.raises(SystemExit):
        cli.main([command, "--help"])
    shown = set(re.findall(r"--[\w.-]+|\b[A-Z]+\b", capsys.readouterr().out))
    assert set(_flags(cli.COMMANDS[command].options).values()) <= shown


# --- imports -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "args",
    [
        ["--help"],
        ["train", "--help"],
        ["train", "--stepz"],
        ["train", "--steps", "0"],
        ["prepare", "--help"],
        ["prepare", "a"],
        ["sample"],
        ["eval", "--help"],
        ["demo", "--help"],
        ["export", "--help"],
        ["import", "--help"],
        ["compare", "--help"],
        ["compare", "--json", "--markdown", "run"],
        ["sweep", "--help"],
        ["sweep", "/nowhere", "--count"],
        ["eval", "run", "--limit", "0"],
        ["bench", "--repeats", "0"],
        ["doctor", "--help"],
    ],
    ids=" ".join,
)
def test_help_and_mistakes_load_no_torch(args: list[str]) -> None:
    code = (
        "import json, sys\n"
        "from ddl.lab.cli import main\n"
        "try:\n"
        f"    main({args!r})\n"
        "except SystemExit:\n"
        "    pass\n"
        "print(json.dumps(sorted(sys.modules)))\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    loaded = {name.split(".")[0] for name in json.loads(result.stdout.splitlines()[-1])}
    assert "ddl" in loaded
    assert loaded & {"torch", "numpy", "matplotlib", "safetensors"} == set()
    assert loaded & {"transformers", "datasets", "lm_eval"} == set()


def test_names_of_the_package() -> None:
    """Names are listed before they are imported, which happens on first use."""
    assert set(ddl.__all__) <= set(dir(ddl))
    with pytest.raises(AttributeError, match=r"^module 'ddl' has no attribute 'DeltaStrem'$"):
        ddl.DeltaStrem  # noqa: B018
