"""ddl.hf and its commands raise InputError for invalid directories; the messages are pinned."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest
import safetensors.torch
import torch

from ddl.errors import InputError
from ddl.hf import load, save
from ddl.models.tokenizers import ByteTokenizer
from tests.support.hf_cases import a_run, model, refused, said
from tests.support.paper_standin import published


def not_loaded(path: Path, pattern: str) -> None:
    with pytest.raises(InputError, match=pattern) as caught:
        load(path)
    assert "\n" not in str(caught.value)


def test_directories_that_are_none_of_ours(tmp_path: Path) -> None:
    expected = "^`path` must be a Hugging Face directory with a model of ddl, got "
    not_loaded(
        tmp_path, f"{expected}{tmp_path}: neither weights nor the config.json of a model in it$"
    )
    run = tmp_path / "runs" / "tiny"
    run.mkdir(parents=True)
    (run / "metrics.jsonl").touch()
    named = f"a directory with runs in it: name one of them, such as {run}$"
    not_loaded(tmp_path / "runs", f"{expected}{tmp_path / 'runs'}: {named}")
    for text in ("{", "[]", '{"model_type": "llama"}'):
        (tmp_path / "config.json").write_text(text)
        not_loaded(tmp_path, expected)


def test_damaged_directories(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    save(model(), ByteTokenizer(), tmp_path)
    weights, config = tmp_path / "model.safetensors", tmp_path / "config.json"
    state, text = safetensors.torch.load_file(weights), config.read_text()
    where = re.escape(f"`{tmp_path}`")

    fields = json.loads(text)
    config.write_text(json.dumps(fields | {"num_layers": 0}))
    not_loaded(tmp_path, "^`num_layers` must be an integer of at least 1, got 0$")
    config.write_text(json.dumps(fields | {"num_layers": 3}))
    lacking = len(model(num_layers=3).state_dict()) - len(state)
    not_loaded(tmp_path, f"^{where} must hold the parameters of its config, got {lacking} missing$")
    config.write_text(json.dumps(fields | {"novelty": 3}))
    newer = "an unknown one; if a newer ddl-rs wrote it, install that version"
    not_loaded(tmp_path, f"^`novelty` must be a field of DDLConfig, got {newer}$")
    config.write_text(text)

    safetensors.torch.save_file(state | {"model.trunk.extra": torch.zeros(1)}, weights)
    not_loaded(tmp_path, f"^{where} must hold the parameters of its config, got 1 unexpected$")
    safetensors.torch.save_file(state | {"model.wte.weight": torch.zeros(2, 2)}, weights)
    not_loaded(tmp_path, f"^{where} must hold the parameters of its config, got 1 mismatched$")
    weights.write_bytes(b"\0" * 30)
    not_loaded(tmp_path, f"^{where} must hold a model of type ddl, got ")
    weights.unlink()
    not_loaded(tmp_path, f"^{where} must hold a model of type ddl, got ")
    assert not caplog.records  # nothing is printed beside the error message
    safetensors.torch.save_file(state, weights)
    (tmp_path / "tokenizer.json").write_text("{")
    not_loaded(tmp_path, f"^{where} must hold a model of type ddl, got ")


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("config.json", '{"model_type": "ddl", "id2label": 5}'),
        ("generation_config.json", "[]"),
        ("tokenizer_config.json", "[]"),
        ("model.safetensors.index.json", "{}"),
    ],
)
def test_damage_that_transformers_stumbles_over(name: str, text: str, tmp_path: Path) -> None:
    save(model(), ByteTokenizer(), tmp_path)
    if name.startswith(("model", "pytorch")):
        (tmp_path / "model.safetensors").unlink()
    (tmp_path / name).write_text(text)
    not_loaded(tmp_path, f"^{re.escape(f'`{tmp_path}`')} must hold a model of type ddl, got ")


def test_code_in_a_directory_is_not_asked_about(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """transformers would offer to run the code that a tokenizer_config.json refers to."""
    save(model(vocab_size=256), ByteTokenizer(), tmp_path)
    path = tmp_path / "tokenizer_config.json"
    there = {"auto_map": {"AutoTokenizer": ["code.Tokenizer", "code.Tokenizer"]}}
    path.write_text(json.dumps(there))
    (tmp_path / "code.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    asked: list[str] = []
    monkeypatch.setattr("builtins.input", lambda *question: asked.append(*question) or "y")
    not_loaded(tmp_path, f"^{re.escape(f'`{tmp_path}`')} must hold a model of type ddl, got ")
    assert not asked
    assert not (tmp_path / "ran").exists()


# --- commands -------------------------------------------------------------------------------------


def test_refusals(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, new = a_run(tmp_path / "run", ByteTokenizer()), str(tmp_path / "new")
    refused(
        capsys,
        "`--hf` must name the directory to write, as in `--hf exported`, got nothing",
        "export",
        run,
    )
    got = f"{run}, a directory with files: choose another"
    used = f"`OUT` must be a new or empty directory, got {got}"
    refused(capsys, used.replace("`OUT`", "`--hf`"), "export", run, "--hf", run)
    refused(capsys, used, "import", run, run)
    kinds = "a run directory of `ddl train` or a Hugging Face directory with a model of ddl"
    sentence = f"`RUN` must be {kinds}, got {new}: No such file or directory"
    refused(capsys, sentence, "export", new, "--hf", new)
    sentence = f"`SRC` must be a file with weights, got {new}: No such file or directory"
    refused(capsys, sentence, "import", new, new)
    sentence = "`--layout` must be left at c_proj without `--reverse`, got 'o_proj'"
    refused(capsys, sentence, "import", run, new, "--layout", "o_proj")
    sentence = "`--variant` must be left at auto with `--reverse`, got 'ddl'"
    refused(capsys, sentence, "import", run, new, "--reverse", "--variant", "ddl")
    sentence = (
        f"`SRC` must be a checkpoint of nanoGPT or of the paper's code, got {run}, a run directory"
        " of `ddl train`: other commands take it as it is, and the other way round is --reverse"
    )
    refused(capsys, sentence, "import", run, new)
    assert not Path(new).exists()
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    assert config["model"]["residual"] == "ddl-cc"  # untouched


@pytest.mark.parametrize("command", ["export", "import", "sample"])
def test_a_missing_extra(
    command: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run, new, out = a_run(tmp_path / "run", ByteTokenizer()), str(tmp_path / "new"), "out"
    torch.save(published("ddl").state_dict(), tmp_path / "x.pt")
    assert said(capsys, "export", run, "--hf", str(tmp_path / out))[0] == 0
    for module in [name for name in sys.modules if name.split(".")[:2] == ["ddl", "hf"]]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.delattr("ddl.hf")
    monkeypatch.setitem(sys.modules, "transformers", None)
    args = {
        "export": [run, "--hf", new],
        "import": [str(tmp_path / "x.pt"), new],
        "sample": [str(tmp_path / out)],
    }[command]
    sentence = f"`ddl {command}` needs the `train,hf` extra: pip install 'ddl-rs[train,hf]'"
    refused(capsys, sentence, command, *args)
    assert not Path(new).exists()
    assert said(capsys, "sample", run, "--tokens", "2", "--device", "cpu")[0] == 0
