"""Directories that the Auto classes load are complete, and their models equal bit for bit."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from accelerate import (
    infer_auto_device_map,
    init_empty_weights,
    load_checkpoint_and_dispatch,
)
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

import ddl.hf
from ddl.hf import DDLConfig, DDLForCausalLM, from_gpt, load, save
from ddl.hf.remote import TEXT
from ddl.hf.tokenization import FastTokenizer
from ddl.models.sublayers import Rotary
from ddl.models.tokenizers import ByteTokenizer
from tests.support.hf_cases import VARIANTS, model, names, small, tokens

every_variant = pytest.mark.parametrize("options", VARIANTS.values(), ids=VARIANTS)
IDX = tokens(2, 24)
FILES = ["config.json", "generation_config.json", "model.safetensors"]
REMOTE, TOKENIZER = ["modeling_ddl.py"], ["tokenizer.json", "tokenizer_config.json"]


def assert_rotated(hf: DDLForCausalLM) -> None:
    """Assert that the rotary tables, which no file contains, equal those of a new model."""
    expected = Rotary(hf.config.head_dim, hf.config.block_size)
    tables = [module for module in hf.modules() if isinstance(module, Rotary)]
    assert len(tables) == hf.config.num_layers - len(hf.config.gpt.mixing_layers)
    for rotary in tables:
        assert rotary.cos.dtype == torch.float32
        assert torch.equal(rotary.cos, expected.cos)
        assert torch.equal(rotary.sin, expected.sin)


@every_variant
def test_there_and_back(options: dict[str, Any], tmp_path: Path) -> None:
    gpt = model(**options)
    expected = gpt(IDX).logits
    save(gpt, ByteTokenizer(), tmp_path)
    assert names(tmp_path) == sorted(FILES + REMOTE + TOKENIZER)
    stored = safetensors.torch.load_file(tmp_path / "model.safetensors")
    assert stored.keys() == {f"model.{name}" for name in gpt.state_dict()}

    hf = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(hf) is DDLForCausalLM
    assert hf.dtype == torch.float32
    assert not hf.training
    assert hf.lm_head.weight is hf.model.wte.weight
    assert torch.equal(hf(IDX).logits, expected)
    assert_rotated(hf)

    again, tokenizer = load(tmp_path)
    assert again.config == gpt.config
    assert torch.equal(again(IDX).logits, expected)
    assert isinstance(tokenizer, FastTokenizer)
    assert isinstance(tokenizer.of_training, ByteTokenizer)


@pytest.mark.table(0)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_model_made_on_meta(dtype: torch.dtype, tmp_path: Path) -> None:
    from_gpt(model(residual="ddl-tc")).save_pretrained(tmp_path, max_shard_size="30KB")
    plain = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=dtype)
    assert_rotated(plain)
    expected = plain(IDX).logits

    with torch.device("meta"):
        empty = DDLForCausalLM(AutoConfig.from_pretrained(tmp_path))
    assert all(p.is_meta for p in empty.parameters())
    empty.load_state_dict(plain.state_dict(), assign=True)
    assert torch.equal(empty(IDX).logits, expected)
    assert_rotated(empty)

    with init_empty_weights():
        empty = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tmp_path), dtype=dtype)
    empty.tie_weights()
    filled = load_checkpoint_and_dispatch(empty, str(tmp_path), device_map={"": "cpu"})
    assert torch.equal(filled(IDX).logits, expected)


def test_a_device_map_keeps_the_trunk_together() -> None:
    hf = from_gpt(model(vocab_size=5000))
    room = 7 * sum(p.numel() * p.element_size() for p in hf.model.trunk.parameters())

    def pieces(whole: Any) -> list[str]:
        devices = infer_auto_device_map(hf, {"cpu": room}, no_split_module_classes=whole)
        return [name for name in devices if name.startswith("model.trunk.")]

    assert pieces([])
    assert not pieces(hf._no_split_modules)


def test_half_precision_becomes_float32(tmp_path: Path) -> None:
    gpt = model().bfloat16()
    save(gpt, None, tmp_path)
    assert names(tmp_path) == sorted(FILES + REMOTE)
    stored = safetensors.torch.load_file(tmp_path / "model.safetensors")
    assert {tensor.dtype for tensor in stored.values()} == {torch.bfloat16}
    again, tokenizer = load(tmp_path)
    assert tokenizer is None
    for name, parameter in again.named_parameters():
        assert parameter.dtype == torch.float32
        assert torch.equal(parameter, gpt.get_parameter(name).float()), name


def test_a_tokenizer_of_anothers(tmp_path: Path) -> None:
    save(model(), ByteTokenizer(), tmp_path)
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    del config["ddl_tokenizer"]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    _, tokenizer = load(tmp_path)
    assert isinstance(tokenizer, FastTokenizer)
    assert tokenizer.encode("é\n") == ByteTokenizer().encode("é\n")
    assert tokenizer.decode([195, 169, 10]) == "é\n"


def test_where_text_ends_is_in_the_generation_config(tmp_path: Path) -> None:
    """The end of text is set for models trained on documents that end with it, not for bytes."""
    save(model(), ByteTokenizer(), tmp_path / "bytes")
    assert (
        AutoModelForCausalLM.from_pretrained(tmp_path / "bytes").generation_config.eos_token_id
        is None
    )
    save(*load(tmp_path / "bytes"), tmp_path / "again")
    fast = AutoTokenizer.from_pretrained(tmp_path / "bytes")
    save(model(), FastTokenizer(fast), tmp_path / "documents")
    for directory, end in (("again", None), ("documents", fast.eos_token_id)):
        hf = AutoModelForCausalLM.from_pretrained(tmp_path / directory)
        assert hf.generation_config.eos_token_id == end


# --- trust_remote_code ----------------------------------------------------------------------------

SCRIPT = """
import sys, torch
from transformers import AutoModelForCausalLM, AutoTokenizer
src, out = sys.argv[1:]
assert not any(name.split(".")[0] == "ddl" for name in sys.modules)
tokenizer = AutoTokenizer.from_pretrained(src)
model = AutoModelForCausalLM.from_pretrained(src, trust_remote_code=True)
ids = tokenizer("ab\\n", return_tensors="pt").input_ids % model.config.vocab_size
torch.save((ids, model(ids).logits), out + ".pt")
model.save_pretrained(out)
again = AutoModelForCausalLM.from_pretrained(out, trust_remote_code=True)
assert torch.equal(again(ids).logits, model(ids).logits)
"""


def test_without_an_import(tmp_path: Path) -> None:
    gpt = model(residual="ddl-tc")
    save(gpt, ByteTokenizer(), tmp_path / "src")
    environment = os.environ | {"HF_HOME": str(tmp_path / "home"), "OMP_NUM_THREADS": "1"}
    out = tmp_path / "out"
    ran = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(tmp_path / "src"), str(out)],
        capture_output=True,
        text=True,
        env=environment,
    )
    assert ran.returncode == 0, ran.stderr
    ids, logits = torch.load(f"{out}.pt")
    assert torch.equal(gpt(ids).logits, logits)
    # The directory saved again has the modelling file that its config refers to, and no others.
    assert names(out) == sorted(FILES + REMOTE)
    assert (out / REMOTE[0]).read_text() == (tmp_path / "src" / REMOTE[0]).read_text() == TEXT
    assert torch.equal(load(out)[0](ids).logits, logits)


def test_no_more_code_than_asked_for(tmp_path: Path) -> None:
    save(model(), None, tmp_path / "plain", remote_code=False)
    assert names(tmp_path / "plain") == FILES
    assert "auto_map" not in json.loads((tmp_path / "plain" / "config.json").read_text())
    DDLForCausalLM.register_for_auto_class()
    assert not DDLForCausalLM.is_remote_code()


def test_without_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ddl.hf", None)
    with pytest.raises(
        ImportError, match=r"^this model needs the package ddl-rs, pip install 'ddl"
    ):
        exec(TEXT, {})


def test_the_names_of_the_package() -> None:
    for name in ddl.hf.__all__:
        assert getattr(ddl.hf, name).__doc__
    assert AutoConfig.for_model("ddl").gpt == DDLConfig().gpt
    assert small() == DDLConfig.from_gpt(small()).gpt
