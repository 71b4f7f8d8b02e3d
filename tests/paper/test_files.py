"""`ddl import`: files of the paper's code in, Hugging Face's out, and the other way round."""

from __future__ import annotations

import collections
import json
import os
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

import ddl.hf
from ddl.config import GPTConfig, TrainConfig
from ddl.data.tokenizer import ByteTokenizer
from ddl.errors import InputError
from ddl.models import GPT
from ddl.paper import convert, import_checkpoint, load
from ddl.train.runs import RunDirectory, load_config
from tests.support.hf_cases import byte_pair_files
from tests.support.paper_standin import PublishedGPT, published

WRITTEN = "config.json, generation_config.json, model.safetensors, modeling_ddl.py"
TOKENIZER = "tokenizer.json, tokenizer_config.json"
THEIRS = {"ddl_v_sigmoid_scale": 3.0, "ddl_state_dv_shortconv_causal": True}


def model() -> PublishedGPT:
    return published("cc-ec", **THEIRS)


def separate(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """As safetensors wants them: no two names share memory."""
    return {name: tensor.clone() for name, tensor in state.items()}


def write(directory: Path, kind: str) -> Path:
    """The model as a file or directory of this kind; what `ddl import` is to be given."""
    directory.mkdir()
    state, config = model().state_dict(), model().config
    if kind != "model_args":
        (directory / "config.json").write_text(json.dumps(config))
    if kind in (".pt", ".bin", "directory"):
        torch.save(state, directory / f"checkpoint{kind.replace('directory', '.pth')}")
    elif kind == ".safetensors":
        safetensors.torch.save_file(separate(state), directory / f"checkpoint{kind}")
    elif kind == "model_args":
        wrapped = {"model": state, "model_args": config, "iter_num": 7, "rng": torch.zeros(3)}
        torch.save(wrapped, directory / "checkpoint.pt")
    elif kind == "nested":
        wrapped = {"model": {"state_dict": state, "step": 3}}
        torch.save(wrapped, directory / "checkpoint.pt")
    elif kind == "model.safetensors":
        safetensors.torch.save_file(separate(state), directory / kind)
        (directory / "training.bin").write_bytes(b"something else")
    elif kind == "pytorch_model.bin":
        torch.save(state, directory / kind)
    else:  # shards
        names = list(state)
        files = {name: f"shard-{index % 2}.bin" for index, name in enumerate(names)}
        for file in set(files.values()):
            torch.save({n: state[n] for n in names if files[n] == file}, directory / file)
        index = {"metadata": {}, "weight_map": files}
        (directory / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    return directory / f"checkpoint{kind}" if kind.startswith(".") else directory


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
    """Whether two directories hold the same checkpoint, bit for bit."""
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
        import_checkpoint(tmp_path / kind, tmp_path / f"{kind}-back", reverse=True)
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


# --- refusals -------------------------------------------------------------------------------------


class Unwanted:
    """A pickle of this makes a directory when it is loaded."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return (os.mkdir, (str(self.path),))


def refused(src: Path, out: Path, pattern: str, **options: Any) -> None:
    with pytest.raises(InputError, match=pattern) as caught:
        import_checkpoint(src, out, **options)
    assert "\n" not in str(caught.value)
    assert not out.exists()


def test_a_pickle_is_never_executed(tmp_path: Path) -> None:
    src, witness = tmp_path / "x.pt", tmp_path / "witness"
    torch.save({"model": Unwanted(witness)}, src)
    pattern = (
        r"^`\S+x.pt` must hold tensors in plain dicts, got something else: it refers to \S+mkdir$"
    )
    refused(src, tmp_path / "out", pattern)
    assert not witness.exists()
    torch.load(src, weights_only=False)
    assert witness.exists()


def test_files_that_are_no_checkpoints(tmp_path: Path) -> None:
    out, src = tmp_path / "out", tmp_path / "x.pt"
    refused(src, out, r"^`src` must be a file with weights, got \S+x.pt: No such file")
    src.write_bytes(b"not a pickle")
    refused(src, out, r"^`\S+x.pt` must hold tensors in plain dicts, got something else: \S")
    src.write_bytes(b"")
    refused(src, out, r"^`\S+x.pt` must hold tensors in plain dicts, got something else: \S")
    torch.save([torch.zeros(1)], src)
    refused(src, out, r"^`\S+x.pt` must hold a state dict, got list$")
    torch.save({"model": {"step": 3}}, src)
    refused(src, out, r"^`src` must hold a state dict, got \S+x.pt with step$")
    cyclic: dict[str, Any] = {}
    cyclic["model"] = cyclic
    torch.save(cyclic, src)
    refused(src, out, r"^`src` must hold a state dict, got \S+x.pt with model$")
    torch.save(collections.OrderedDict(model().state_dict()), src)
    (tmp_path / "config.json").write_text("{")
    refused(src, out, r"^`\S+config.json` must be JSON, got: Expecting")
    (tmp_path / "config.json").write_text("[]")
    refused(src, out, r"^`\S+config.json` must be a JSON object, got list$")
    (tmp_path / "config.json").write_text("[" * 100_000)
    refused(src, out, r"^`\S+config.json` must be JSON, got: ")
    broken = tmp_path / "x.safetensors"
    broken.write_bytes(b"\0" * 20)
    refused(broken, out, r"^`\S+x.safetensors` must hold tensors in plain dicts, got")


def test_directories_without_a_checkpoint(tmp_path: Path) -> None:
    src, out = tmp_path / "src", tmp_path / "out"
    src.mkdir()
    refused(src, out, r"^`src` must name a file with weights, or a .* with none$")
    for name in ("a.pt", "b.pt"):
        torch.save({}, src / name)
    refused(src, out, r"^`src` must name a file with weights, .* with these: a.pt, b.pt$")
    index = src / "model.safetensors.index.json"
    outside, strange = {"a": "../a.pt"}, {"a": ["a.pt"]}
    for files in (outside, strange, {}, [3], None):
        listing = {"weight_map": files}
        index.write_text(json.dumps(listing))
        refused(src, out, r"^`\S+index.json` must map parameters to files beside it")
    index.write_text(json.dumps({"weight_map": {"a": "missing.bin"}}))
    refused(src, out, r"^`src` must be a file with weights, got \S+missing.bin: No such file")


def test_nothing_is_written_for_weights_that_do_not_fit(tmp_path: Path) -> None:
    src, out = write(tmp_path / "theirs", ".pt"), tmp_path / "out"
    refused(src, out, "ddl-tc model, got 3 missing .* and 3 unknown", variant="ddl-tc")
    state = model().state_dict()
    del state["ln_f.weight"]
    torch.save(state, src)
    refused(src, out, r"got 1 missing \(ln_f.weight\)$")


def test_out_must_be_new_or_empty(tmp_path: Path) -> None:
    src, out = write(tmp_path / "theirs", ".pt"), tmp_path / "out"
    out.mkdir()
    (out / "notes").write_text("mine")
    sentence = f"`out` must be a new or empty directory, got {out}, a directory with files"
    for reverse in (False, True):
        with pytest.raises(InputError, match=f"^{re.escape(sentence)}$"):
            import_checkpoint(src, out, reverse=reverse)
    assert (out / "notes").read_text() == "mine"
    with pytest.raises(InputError, match=r"must be a new or empty directory, got .*, a file$"):
        import_checkpoint(src, out / "notes")
    with pytest.raises(InputError, match=r"^`out` must be .* (Not a directory|File exists)"):
        import_checkpoint(src, out / "notes" / "deep")
    (out / "notes").unlink()
    assert len(import_checkpoint(src, out)) == 3


def test_half_a_directory_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    src, out = write(tmp_path / "theirs", ".pt"), tmp_path / "out"
    monkeypatch.setattr(ddl.hf.DDLForCausalLM, "save_pretrained", full)
    refused(src, out, r"^`out` must be writable, got \S+out: No space left on device$")
    monkeypatch.undo()
    import_checkpoint(src, tmp_path / "ours")
    monkeypatch.setattr(torch, "save", full)
    refused(tmp_path / "ours", out, "^`out` must be writable, got", reverse=True)


def test_a_link_to_an_empty_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def half(self: object, folder: Path, *_: object) -> None:
        (folder / "model.safetensors").write_bytes(b"half")
        raise KeyboardInterrupt

    src, real, link = write(tmp_path / "theirs", ".pt"), tmp_path / "real", tmp_path / "link"
    real.mkdir()
    link.symlink_to(real)
    before = sorted(tmp_path.iterdir())
    with monkeypatch.context() as patch:
        patch.setattr(ddl.hf.DDLForCausalLM, "save_pretrained", half)
        with pytest.raises(KeyboardInterrupt):
            import_checkpoint(src, link)
    assert sorted(tmp_path.iterdir()) == before
    assert list(real.iterdir()) == []
    import_checkpoint(src, link)
    assert link.is_symlink()
    assert (real / "model.safetensors").stat().st_size > 4


def test_the_wrong_way_round(tmp_path: Path) -> None:
    src, ours, out = write(tmp_path / "theirs", ".pt"), tmp_path / "ours", tmp_path / "out"
    import_checkpoint(src, ours)
    refused(ours, out, r"^`src` must be a checkpoint of the paper's code, .* directory of ddl: the")
    (src.parent / "config.json").write_text('{"n_layer": 2}')
    refused(src.parent, out, r"^`config.json` must hold a TrainConfig, got: ", reverse=True)
    (src.parent / "config.json").write_text('{"architectures": []}')
    refused(src.parent, out, r"^`run` must be a run directory of `ddl train`, got", reverse=True)
    (src.parent / "config.json").write_text("[" * 100_000)
    refused(src.parent, out, r"^`config.json` must hold a TrainConfig, got: ", reverse=True)
    (src.parent / "config.json").unlink()
    files = byte_pair_files(tmp_path / "files")
    pattern = (
        r"^`tokenizer` must be left out unless the model's tokens are GPT-2's, .* for characters$"
    )
    refused(src, out, pattern, tokenizer=files)
    config = json.loads((ours / "config.json").read_text())
    for odd in ({"dtype": "foo"}, {"id2label": 5}, {"head_dim": 3}):
        (ours / "config.json").write_text(json.dumps(config | odd))
        refused(ours, out, r"config.json` must be a config of a model of ddl, got", reverse=True)
    (ours / "config.json").write_text(json.dumps(config))
    (ours / "model.safetensors").write_bytes(b"damaged")
    refused(ours, out, r"model.safetensors` must hold tensors in plain dicts, got", reverse=True)
    (ours / "model.safetensors").unlink()
    refused(ours, out, r"^`src` must name a file with weights, or a directory", reverse=True)


def test_a_run_that_the_paper_does_not_have(tmp_path: Path) -> None:
    config = GPTConfig(vocab_size=61, num_layers=1, hidden_size=24, num_heads=2)
    training = TrainConfig(model=config, data=None, out=tmp_path / "run")
    RunDirectory.create(training, ByteTokenizer()).save(GPT(config))
    assert load_config(tmp_path / "run").model == config
    pattern = "^`value_from` must be compressed in the paper's code, got context$"
    refused(tmp_path / "run", tmp_path / "out", pattern, reverse=True)
    with pytest.raises(InputError, match=r"^`src` must be a checkpoint of the paper's code, got"):
        import_checkpoint(tmp_path / "run", tmp_path / "out")
