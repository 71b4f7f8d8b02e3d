"""`ddl import` converts files of the paper's code to Hugging Face directories and back."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import safetensors.torch
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import ddl.hf
from ddl.lab import exchange
from ddl.lab.config import TrainConfig
from ddl.lab.train.runs import RunDirectory
from ddl.models.tokenizers import ByteTokenizer
from ddl.paper import convert, import_checkpoint, load
from tests.support.hf_cases import byte_pair_files
from tests.support.paper_files import model, write
from tests.support.paper_standin import published

WRITTEN = "config.json, generation_config.json, model.safetensors, modeling_ddl.py"
TOKENIZER = "tokenizer.json, tokenizer_config.json"


KINDS = [
    ".pt",
    ".bin",
    ".safetensors",
    "directory",
    "model_args",
    "nested",
    "model.safetensors",
    "pytorch_model.bin",
    "shards",
]


@pytest.mark.parametrize("kind", KINDS)
def test_every_file_becomes_a_directory_of_hugging_faces(tmp_path: Path, kind: str) -> None:
    src, out = write(tmp_path / "theirs", kind), tmp_path / "ours"
    report = import_checkpoint(src, out)
    assert report == [
        "ddl-cc: 2 blocks, 2 heads of 12, hidden size 24, vocabulary 61",
        "assumed, because neither the weights nor config.json say: rope_base = 10000.0,"
        " ddl_beta_init = 1.0, ddl_k_eps = 1e-05, ddl_v_constant = False, ddl_v_sigmoid = True,"
        " tokens = characters of a table that is not known",
        f"wrote {out}: {WRITTEN}",
    ]
    loaded = AutoModelForCausalLM.from_pretrained(out)
    assert loaded.config.gpt == convert(model().state_dict(), model().config)[0]
    idx = torch.randint(61, (2, 24))
    torch.testing.assert_close(loaded(idx).logits, model()(idx), rtol=1e-5, atol=1e-5)
    again, tokenizer = ddl.hf.load(out)
    assert torch.equal(again(idx).logits, loaded(idx).logits)
    assert tokenizer is None


def test_there_and_back(tmp_path: Path) -> None:
    src = write(tmp_path / "theirs", ".pt")
    import_checkpoint(src, tmp_path / "ours")
    report = import_checkpoint(tmp_path / "ours", tmp_path / "again", reverse=True)
    assert report == [
        "ddl-cc: 2 blocks, 2 heads of 12, hidden size 24, vocabulary 61",
        f"wrote {tmp_path / 'again'}: config.json, pytorch_model.bin",
    ]
    assert sorted(p.name for p in (tmp_path / "again").iterdir()) == [
        "config.json",
        "pytorch_model.bin",
    ]
    before, after = load(src), load(tmp_path / "again")
    assert set(before.state_dict) == set(after.state_dict)
    for name, tensor in before.state_dict.items():
        assert torch.equal(after.state_dict[name], tensor)
    assert after.config is not None
    assert before.config == {name: after.config[name] for name in before.config}
    head, embedding = (after.state_dict[n] for n in ("lm_head.weight", "transformer.wte.weight"))
    assert head.data_ptr() == embedding.data_ptr()  # stored once

    import_checkpoint(tmp_path / "ours", tmp_path / "newest", reverse=True, layout="o_proj")
    assert "input_embed.weight" in load(tmp_path / "newest").state_dict


def same(a: Path, b: Path) -> bool:
    """Return whether two directories hold the same checkpoint, bit for bit."""
    first, second = load(a), load(b)
    return first.config == second.config and all(
        tensor.dtype == second.state_dict[name].dtype
        and torch.equal(tensor, second.state_dict[name])
        for name, tensor in first.state_dict.items()
    )


def test_back_from_a_run_and_from_shards(tmp_path: Path) -> None:
    src = write(tmp_path / "theirs", ".pt")
    import_checkpoint(src, tmp_path / "ours")
    import_checkpoint(tmp_path / "ours", tmp_path / "expected", reverse=True)

    gpt, _ = ddl.hf.load(tmp_path / "ours")
    training = TrainConfig(model=gpt.config, data=None, out=tmp_path / "run")
    RunDirectory.create(training, ByteTokenizer()).save(gpt)
    ddl.hf.from_gpt(gpt).save_pretrained(tmp_path / "shards", max_shard_size="20KB")
    assert (tmp_path / "shards" / "model.safetensors.index.json").exists()
    for kind in ("run", "shards"):
        exchange.import_checkpoint(tmp_path / kind, tmp_path / f"{kind}-back", reverse=True)
        assert same(tmp_path / f"{kind}-back", tmp_path / "expected"), kind


def test_a_half_precision_checkpoint_stays_one(tmp_path: Path) -> None:
    torch.save(model().bfloat16().state_dict(), tmp_path / "x.pt")
    import_checkpoint(tmp_path / "x.pt", tmp_path / "ours")
    stored = safetensors.torch.load_file(tmp_path / "ours" / "model.safetensors")
    assert {tensor.dtype for tensor in stored.values()} == {torch.bfloat16}
    assert ddl.hf.load(tmp_path / "ours")[0].wte.weight.dtype == torch.float32
    import_checkpoint(tmp_path / "ours", tmp_path / "back", reverse=True)
    state = load(tmp_path / "x.pt").state_dict
    for name, tensor in load(tmp_path / "back").state_dict.items():
        assert torch.equal(tensor, state[name]), name


def test_parameters_in_one_flat_buffer(tmp_path: Path) -> None:
    state = published("ddl").state_dict()
    flat = torch.cat([tensor.flatten() for tensor in state.values()])
    parts = flat.split([tensor.numel() for tensor in state.values()])
    views = {n: part.view_as(t) for (n, t), part in zip(state.items(), parts, strict=True)}
    torch.save(views, tmp_path / "x.pt")
    import_checkpoint(tmp_path / "x.pt", tmp_path / "ours")
    loaded, _ = ddl.hf.load(tmp_path / "ours")
    assert torch.equal(loaded.wte.weight, state["transformer.wte.weight"])


def test_config_json_counts_before_what_the_weights_carry(tmp_path: Path) -> None:
    src = write(tmp_path / "theirs", "model_args")
    assert load(src).config == model().config
    (src / "config.json").write_text(json.dumps({"block_size": 7}))
    assert load(src).config == {"block_size": 7}


@pytest.mark.parametrize(("vocabulary", "kind"), [(50304, "gpt2"), (50257, "gpt2"), (256, "bytes")])
def test_tokens_by_the_size_of_the_vocabulary(
    tmp_path: Path, vocabulary: int, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "tiktoken", None)
    small = published("ddl", vocab_size=vocabulary, num_hidden_layers=1)
    torch.save(small.state_dict(), tmp_path / "x.pt")
    report = import_checkpoint(tmp_path / "x.pt", tmp_path / "ours")
    assert report[1].endswith(f"tokens = {kind}")
    if kind == "bytes":
        assert report[2:] == [f"wrote {tmp_path / 'ours'}: {WRITTEN}, {TOKENIZER}"]
        read = AutoTokenizer.from_pretrained(tmp_path / "ours")
        assert read("é\n").input_ids == [195, 169, 10]
        return
    assert report[2:] == [
        f"wrote {tmp_path / 'ours'}: {WRITTEN}",
        "without a tokenizer: GPT-2 tokens need the package tiktoken to be read as text: pip"
        " install tiktoken",
    ]
    assert ddl.hf.load(tmp_path / "ours")[1] is None

    files = byte_pair_files(tmp_path / "files")
    report = import_checkpoint(tmp_path / "x.pt", tmp_path / "whole", tokenizer=files)
    assert report[2:] == [f"wrote {tmp_path / 'whole'}: {WRITTEN}, {TOKENIZER}"]
    _, tokenizer = ddl.hf.load(tmp_path / "whole")
    assert tokenizer is not None
    assert tokenizer.decode(tokenizer.encode("to be")) == "to be"


def test_what_is_left_out_is_said(tmp_path: Path) -> None:
    constant = published("tc", ddl_v_constant=True)
    torch.save({"model": constant.state_dict(), "model_args": constant.config}, tmp_path / "x.pt")
    report = import_checkpoint(tmp_path / "x.pt", tmp_path / "ours")
    assert report[2].startswith("left out, because the model never uses them: transformer.h.0.ddl_")
