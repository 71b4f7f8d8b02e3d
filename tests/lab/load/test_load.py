"""Recognise the kind of model at a path, and load it."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers")

import ddl.hf
from ddl.errors import InputError
from ddl.lab.cli.sample import sample
from ddl.lab.config import SampleConfig
from ddl.lab.load import load, load_for_transformers
from ddl.models import NanoGPT, NanoGPTConfig
from ddl.models.tokenizers import ByteTokenizer, CharTokenizer, training_tokenizer
from ddl.paths import PathKind, path_kind
from tests.support.hf_cases import a_run, model, tokens
from tests.support.paper_standin import published

IDX = tokens(2, 12)


def test_every_kind_of_path_is_told_and_loaded(tmp_path: Path) -> None:
    gpt = model(vocab_size=256)
    a_run(tmp_path / "run", ByteTokenizer())
    ddl.hf.save(gpt, ByteTokenizer(), tmp_path / "hf")
    kinds = {"run": PathKind.RUN, "hf": PathKind.DDL}
    for name, kind in kinds.items():
        assert path_kind(tmp_path / name) is kind
        loaded = load(tmp_path / name, "cpu")
        assert torch.equal(loaded.model(IDX).logits, gpt(IDX).logits)
        assert isinstance(training_tokenizer(loaded.tokenizer), ByteTokenizer)
        assert not loaded.model.training
        theirs, fast = load_for_transformers(tmp_path / name, "cpu")
        assert torch.equal(theirs(IDX).logits, gpt(IDX).logits)
        assert fast("ab").input_ids == [97, 98]


@pytest.mark.parametrize("bare", [True, False], ids=["file", "directory"])
def test_a_checkpoint_of_the_papers_code(bare: bool, tmp_path: Path) -> None:
    theirs = published("cc-ec", vocab_size=256)
    torch.save({"model": theirs.bfloat16().state_dict()}, tmp_path / "x.pt")
    (tmp_path / "config.json").write_text(json.dumps(theirs.config))
    path = tmp_path / "x.pt" if bare else tmp_path
    assert path_kind(path) is PathKind.CHECKPOINT
    loaded = load(path, "cpu")
    assert loaded.model.wte.weight.dtype == torch.float32
    torch.testing.assert_close(loaded.model(IDX).logits, theirs.float()(IDX), rtol=1e-5, atol=1e-5)
    text = sample(SampleConfig(run=path, prompt="ab", tokens=3, device="cpu"))
    assert text.startswith("ab")


def write(directory: Path, **files: str) -> Path:
    directory.mkdir()
    for name, text in files.items():
        (directory / name.replace("__", ".")).write_text(text)
    return directory


@pytest.mark.parametrize(
    ("files", "kind"),
    [
        ({}, None),
        ({"config__json": "{}"}, None),
        ({"config__json": "{", "x__pt": ""}, None),
        ({"config__json": '{"model": "gpt"}'}, None),
        ({"config__json": '{"model": {"residual": "ddl"}}'}, PathKind.RUN),
        ({"config__json": '{"model_type": "ddl"}'}, PathKind.DDL),
        ({"config__json": '{"model_type": "llama"}'}, PathKind.HUGGING_FACE),
        ({"config__json": '{"model_type": 3}', "x__bin": ""}, PathKind.HUGGING_FACE),
        ({"config__json": '{"model_type": "nanogptpro"}', "x__bin": ""}, PathKind.CHECKPOINT),
        ({"config__json": '{"n_layer": 2}', "model__safetensors": ""}, PathKind.CHECKPOINT),
        ({"model__safetensors__index__json": "{}"}, PathKind.CHECKPOINT),
        ({"notes__txt": "mine"}, None),
        ({"metrics__jsonl": "", "model__safetensors": ""}, None),
    ],
)
def test_kinds(files: dict[str, str], kind: PathKind | None, tmp_path: Path) -> None:
    assert path_kind(write(tmp_path / "x", **files)) is kind


@pytest.mark.parametrize("name", ["x.pt", "x.PTH", "x.bin", "x.safetensors", "x.index.json"])
def test_a_file_with_weights(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text("")
    assert path_kind(tmp_path / name) is PathKind.CHECKPOINT


@pytest.mark.parametrize("name", ["sweep.toml", "notes.txt", "config.json", "pt", "x.pt.zip"])
def test_any_other_file(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text("{}")
    assert path_kind(tmp_path / name) is None
    got = rf", got \S+{name}: a file whose name ends in none of \.pt, .*, \.index\.json$"
    for loading in (load, load_for_transformers):
        with pytest.raises(InputError, match=got):
            loading(tmp_path / name)


def test_a_file_of_a_directory_of_ours_is_no_checkpoint(tmp_path: Path) -> None:
    path = write(tmp_path / "x", config__json='{"model_type": "ddl"}', model__safetensors="")
    file = path / "model.safetensors"
    assert path_kind(file) is None
    sentence = f"got {file}: a file in a Hugging Face directory with a model of ddl"
    with pytest.raises(InputError, match=re.escape(sentence)):
        load(file)


def test_one_name_for_the_path(tmp_path: Path) -> None:
    """Errors name the argument as the caller does, whichever subpackage raises them."""
    run = Path(a_run(tmp_path / "run", ByteTokenizer()))
    (run / "tokenizer.json").unlink()
    with pytest.raises(InputError, match=r"^`where` must be a run directory with tokenizer\.json"):
        load(run, argument="where")
    (tmp_path / "x.pt").write_bytes(b"")
    with pytest.raises(InputError, match=r"x\.pt` must hold tensors in plain dicts, got"):
        load(tmp_path / "x.pt", argument="where")
    torch.save({"step": 3}, tmp_path / "x.pt")
    with pytest.raises(InputError, match=r"^`where` must hold a state dict, got"):
        load(tmp_path / "x.pt", argument="where")
    with pytest.raises(InputError, match=r"^`where` must be a run .*, got \S+gone: No such file"):
        load_for_transformers(tmp_path / "gone", argument="where")


def test_a_name_that_is_too_long() -> None:
    name = "x" * 300
    assert path_kind(Path(name)) is None
    with pytest.raises(InputError, match=r"^`run` must be "):
        load(name, argument="run")


def test_a_run_without_its_config(tmp_path: Path) -> None:
    run = write(tmp_path / "run", metrics__jsonl="", model__safetensors="")
    with pytest.raises(InputError, match=r"a run that has lost its config\.json$"):
        load(run)


def test_a_tokenizer_config_with_other_types(tmp_path: Path) -> None:
    """transformers looks at them when a text is encoded, which was too late."""
    ddl.hf.save(model(vocab_size=256), ByteTokenizer(), tmp_path / "hf")
    file = tmp_path / "hf/tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"model_max_length": "x"}))
    for loading in (load, load_for_transformers):
        with pytest.raises(InputError, match=r"between instances of 'int' and 'str'$"):
            loading(tmp_path / "hf", "cpu")


def test_only_tokens_of_the_tokenizer_are_sampled(tmp_path: Path) -> None:
    """A vocabulary is padded with tokens that no training has made unlikely."""
    padded = CharTokenizer("ab\n")
    run = Path(a_run(tmp_path / "run", padded, vocab_size=256))
    nanogpt = NanoGPT(NanoGPTConfig(vocab_size=256, block_size=16, n_layer=1, n_head=2, n_embd=32))
    ddl.hf.save(nanogpt, padded, tmp_path / "hf")
    for path in (run, tmp_path / "hf"):
        for temperature in (0.0, 5.0):
            options = {"prompt": "ab", "tokens": 40, "temperature": temperature, "top_k": None}
            text = sample(SampleConfig(run=path, device="cpu", **options))  # type: ignore[arg-type]
            assert set(text.replace("<|endoftext|>", "")) <= set("ab\n")


def test_a_default_prompt_that_cannot_be_encoded_is_called_so(tmp_path: Path) -> None:
    run = Path(a_run(tmp_path / "run", CharTokenizer("ab"), vocab_size=256))
    expected = r"^`prompt` must consist of the 2 characters .*, got '\\n', the default$"
    with pytest.raises(InputError, match=expected):
        sample(SampleConfig(run=run, device="cpu"))
