"""Converted decoders are saved under a type of their own, and adapters alone."""

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
from transformers import AutoConfig, AutoModelForCausalLM, LlamaForCausalLM

from ddl import hf
from ddl.errors import InputError
from ddl.hf.remote import TEXT
from ddl.lab import cli
from ddl.models.tokenizers import ByteTokenizer, printable
from ddl.nanogpt.annealing import Annealing
from ddl.optim import never_decayed
from tests.support.decoder_cases import FAMILIES, VARIANTS, converted, plain, tokens
from tests.support.hf_cases import names
from tests.support.sampling import few

WHOLE = [name for name in VARIANTS if "adapter" not in name]


@pytest.mark.parametrize("variant", few(WHOLE, "token and conv", "v-Map", "annealed"))
def test_the_auto_class_loads_what_was_saved(variant, tmp_path):
    model, idx = converted(variant), tokens()
    model.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["model_type"] == "ddl-decoder"
    assert config["architectures"] == ["DDLDecoderForCausalLM"]
    assert config["base_type"] == "llama"
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(loaded) is type(model)
    assert isinstance(loaded, LlamaForCausalLM)
    torch.testing.assert_close(loaded(idx).logits, model(idx).logits)
    assert all(torch.equal(p, loaded.get_parameter(name)) for name, p in model.named_parameters())
    half = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert half.dtype == torch.bfloat16
    assert {p.dtype for p in never_decayed(half)} == {torch.float32}
    assert half.lm_head.weight.dtype == torch.bfloat16
    eager = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager")
    assert eager.config._attn_implementation == "eager"
    torch.testing.assert_close(eager(idx).logits, model(idx).logits, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("family", few(FAMILIES, "Mixtral", "GPT2"))
def test_every_family_is_loaded(family, tmp_path):
    tied = {} if family == "GPT2" else {"tie_word_embeddings": True}
    model, idx = converted("token and conv", family, **tied), tokens()
    model.save_pretrained(tmp_path)
    names = safetensors.torch.load_file(tmp_path / "model.safetensors").keys()
    assert "lm_head.weight" not in names
    loaded, found = AutoModelForCausalLM.from_pretrained(
        tmp_path, output_loading_info=True, device_map={"": "cpu"}
    )
    assert not any(found[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    torch.testing.assert_close(loaded(idx).logits, model(idx).logits)
    assert loaded.lm_head.weight is loaded.get_input_embeddings().weight


def test_how_far_it_is_annealed_is_saved(tmp_path):
    model = converted("annealed")
    for step, done in ((3, False), (4, True)):
        (annealing,) = [m for m in model.modules() if isinstance(m, Annealing)]
        annealing.step.fill_(step)
        model.save_pretrained(tmp_path)
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
        (annealing,) = [m for m in loaded.modules() if isinstance(m, Annealing)]
        assert (int(annealing.step), annealing.done) == (step, done)


def test_from_a_configuration_a_model_is_drawn(tmp_path):
    converted("channel").save_pretrained(tmp_path)
    config = hf.DDLDecoderConfig.from_pretrained(tmp_path)
    torch.manual_seed(0)
    drawn = AutoModelForCausalLM.from_config(config)
    assert drawn.delta_args["value_channels"] == 4
    assert torch.equal(drawn.model.layers[0].res_1.value.bias, torch.ones(4))


def test_a_model_made_on_meta_has_the_distribution_of_one_made_at_once():
    for name, options in VARIANTS.items():
        kind, config = type(converted(name)), plain().config
        with torch.device("meta"):
            model = kind(config)
        model.to_empty(device="cpu")
        torch.manual_seed(1)
        model.reset_parameters()
        made = hf.convert(plain(), **options)
        torch.manual_seed(1)
        made.reset_parameters()
        for parameter in never_decayed(made):
            assert parameter.isfinite().all()
        names = {n for n, p in made.named_parameters() if n in made.of_stream()}
        assert names
        for each in names:
            assert torch.equal(model.get_parameter(each), made.get_parameter(each)), each


@pytest.mark.parametrize("family", ["Llama", "GPT2", "Qwen3"])
def test_the_class_of_the_base_does_not_load_it(family, tmp_path):
    """Neither by the fields within, nor by the defaults of its configuration."""
    model = converted("channel", family)
    model.save_pretrained(tmp_path)
    kind: Any = type(plain(family))
    with pytest.raises(Exception, match=r"num_hidden_layers|those in|'str'|integer"):
        kind.from_pretrained(tmp_path)


def test_fields_of_the_base_can_be_set_when_it_is_loaded(tmp_path):
    model = converted("channel")
    model.save_pretrained(tmp_path)
    given = {"use_cache": False, "attention_dropout": 0.25}
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, **given)
    assert (loaded.config.use_cache, loaded.config.attention_dropout) == (False, 0.25)
    config = AutoConfig.from_pretrained(tmp_path)
    assert config.vocab_size == model.config.vocab_size
    config.attention_dropout = 0.5
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, config=config)
    assert loaded.config.attention_dropout == 0.5
    assert loaded.config.rms_norm_eps == model.config.rms_norm_eps
    with pytest.raises(AttributeError, match=r"^DDLDecoderConfig has no field 'colour'$"):
        config.colour  # noqa: B018


SCRIPT = """
import sys, torch
from transformers import AutoModelForCausalLM
src, adapter, out = sys.argv[1:]

def refused(path, trusted):
    try:
        AutoModelForCausalLM.from_pretrained(path, trust_remote_code=trusted)
    except ValueError as error:
        return str(error)

untrusted = refused(src, False)
assert not any(name.split(".")[0] == "ddl" for name in sys.modules)
model = AutoModelForCausalLM.from_pretrained(src, trust_remote_code=True)
ids = torch.arange(12).view(1, 12)
new = model.generate(ids, max_new_tokens=4, do_sample=False)
torch.save((untrusted, ids, model(ids).logits, new, refused(adapter, True)), out + ".pt")
model.save_pretrained(out)
again = AutoModelForCausalLM.from_pretrained(out, trust_remote_code=True)
assert torch.equal(again(ids).logits, model(ids).logits)
"""


def test_a_process_that_has_not_imported_ddl_hf(tmp_path):
    """It loads no plain Llama, and with `trust_remote_code` the converted one."""
    model, (src, adapter, out) = converted("token and conv"), map(str, names_in(tmp_path))
    model.save_pretrained(src)
    hf.convert(plain(), **VARIANTS["adapter"]).save_pretrained(adapter)
    ran = subprocess.run(
        [sys.executable, "-c", SCRIPT, src, adapter, out],
        capture_output=True,
        text=True,
        env=os.environ | {"HF_HOME": str(tmp_path / "home"), "OMP_NUM_THREADS": "1"},
    )
    assert ran.returncode == 0, ran.stderr
    untrusted, ids, logits, new, of_adapter = torch.load(f"{out}.pt")
    assert "trust_remote_code=True" in untrusted
    assert torch.equal(model(ids).logits, logits)
    assert torch.equal(model.generate(ids, max_new_tokens=4, do_sample=False), new)
    assert of_adapter.startswith("`path` must hold a whole model, or be given to `ddl.hf.load_adap")
    assert names(Path(out)) == names(Path(src))
    assert (Path(out) / "modeling_ddl.py").read_text() == TEXT


def names_in(folder: Path) -> list[Path]:
    return [folder / name for name in ("src", "adapter", "out")]


@pytest.mark.parametrize("variant", ["token and conv", "channel"])
def test_ddl_sample_takes_the_directory(variant, tmp_path, capsys):
    torch.manual_seed(0)
    model, path = hf.convert(plain(vocab_size=300), **VARIANTS[variant]), str(tmp_path)
    fast = hf.to_fast(ByteTokenizer())
    with torch.no_grad():
        for parameter in never_decayed(model):
            parameter.add_(0.3 * torch.randn_like(parameter))
    model.save_pretrained(path)
    command = ["sample", path, "--prompt", "the cat", "--tokens", "9", "--device", "cpu"]
    sentence = f"`RUN` must have a tokenizer, got {path} without tokenizer.json: save the tokenizer"
    assert cli.main(command) == 1
    assert sentence in capsys.readouterr().err
    fast.save_pretrained(path)
    ids = torch.tensor([fast("the cat").input_ids])
    suppressed = list(range(256, 300))  # rows of the vocabulary that no byte has
    greedy = model.generate(
        ids, max_new_tokens=9, do_sample=False, eos_token_id=None, suppress_tokens=suppressed
    )
    assert cli.main([*command, "--temperature", "0"]) == 0
    assert capsys.readouterr().out == f"{printable(fast.decode(greedy[0]))}\n"
    texts = []
    for seed in ("1", "1", "2"):
        assert cli.main([*command, "--seed", seed, "--temperature", "2"]) == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1] != texts[2]
    assert cli.main([*command, "--tokens", "60", "--temperature", "0"]) == 0
    printed, more = capsys.readouterr().out, greedy
    for _ in range(60 - 9):  # the last 64 tokens are the context
        logits = model(more[:, -64:]).logits[:, -1, :256]
        more = torch.cat((more, logits.argmax(-1, keepdim=True)), 1)
    assert printed == f"{printable(fast.decode(more[0]))}\n"


@pytest.mark.parametrize("family", ["Llama", "GPT2"])
def test_an_adapter_is_saved_alone_and_loaded_beside_its_model(family, tmp_path):
    model, idx = hf.convert(plain(family), **VARIANTS["adapter"]), tokens()
    trained = [p for p in model.parameters() if p.requires_grad]
    assert {id(p) for p in trained} == {id(p) for p in never_decayed(model)}
    for parameter in trained:
        torch.nn.init.normal_(parameter, std=0.3)
    model.save_pretrained(tmp_path)
    saved = safetensors.torch.load_file(tmp_path / "model.safetensors")
    assert saved.keys() == model.of_stream()
    other = hf.load_adapter(plain(family), tmp_path)
    assert torch.equal(other(idx).logits, model(idx).logits)
    assert [p.requires_grad for p in other.parameters()] == [
        p.requires_grad for p in model.parameters()
    ]
    with pytest.raises(InputError, match=r"^`path` must hold a whole model, or be given to `ddl.h"):
        AutoModelForCausalLM.from_pretrained(tmp_path)


def test_adapters_that_do_not_fit_are_refused(tmp_path):
    hf.convert(plain(), **VARIANTS["adapter"]).save_pretrained(tmp_path / "adapter")
    converted("channel").save_pretrained(tmp_path / "whole")
    with pytest.raises(InputError, match=r"^`path` must hold an adapter of a converted decoder"):
        hf.load_adapter(plain(), tmp_path / "whole")
    with pytest.raises(InputError, match=r"^`model` must be a LlamaForCausalLM, got a Qwen2ForCau"):
        hf.load_adapter(plain("Qwen2"), tmp_path / "adapter")
    for sizes in ({"num_hidden_layers": 3}, {"hidden_size": 64}):
        model = plain(**sizes)
        before = {name: value.clone() for name, value in model.state_dict().items()}
        with pytest.raises(InputError, match=r"^`path` must hold the parameters of an adapter for"):
            hf.load_adapter(model, tmp_path / "adapter")
        assert type(model) is LlamaForCausalLM
        assert model.state_dict().keys() == before.keys()


def test_an_adapter_is_small():
    """Below half a percent from 256 features on, without the embedding."""
    for options in ({"value_channels": 1}, {"value_channels": 4}):
        model = plain(hidden_size=256, intermediate_size=768, num_hidden_layers=4)
        sublayers = sum(p.numel() for p in model.model.layers.parameters())
        hf.convert(model, train="stream", **options)
        added = sum(p.numel() for p in never_decayed(model))
        assert added / sublayers < 0.005
