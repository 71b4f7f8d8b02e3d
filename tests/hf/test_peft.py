"""PEFT's adapters give right numbers, gradients, files and merged models, or are refused."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import torch.nn.functional as F
import transformers
from packaging.version import Version
from peft import (
    AutoPeftModelForCausalLM,
    IA3Config,
    LNTuningConfig,
    LoraConfig,
    PeftModel,
    PrefixTuningConfig,
    PromptEncoderConfig,
    PromptTuningConfig,
    TrainableTokensConfig,
    get_peft_model,
)
from torch import Tensor
from transformers.integrations.peft import MIN_PEFT_VERSION

from ddl import record
from ddl.hf import DDLForCausalLM, from_gpt
from ddl.models import GPT
from tests.support.hf_cases import model, tokens
from tests.support.tolerances import assert_close

TASK: dict[str, Any] = {"task_type": "CAUSAL_LM"}
IDX = tokens(2, 12)


def lora(*modules: str, **options: Any) -> LoraConfig:
    given = list(modules) or ["c_q"]
    return LoraConfig(r=4, target_modules=given, init_lora_weights=False, **options, **TASK)


WORKING: dict[str, Any] = {
    "every linear": LoraConfig(target_modules="all-linear", init_lora_weights=False, **TASK),
    "dora": lora("c_v", "c_fc1", use_dora=True),
    "parameters": LoraConfig(
        r=4, target_modules=[], target_parameters=["c_q.weight"], init_lora_weights=False, **TASK
    ),
    "tokens": lora(trainable_token_indices=[3, 5]),
    "tokens alone": TrainableTokensConfig(target_modules=["wte"], token_indices=[3, 5], **TASK),
    "ia3": IA3Config(
        target_modules=["c_k", "c_fc1"],
        feedforward_modules=["c_fc1"],
        init_ia3_weights=False,
        **TASK,
    ),
    "norms": LNTuningConfig(target_modules=["q_rms", "k_rms"], **TASK),
    "gates and values": lora(modules_to_save=["gate", "value"]),
    "a residual": lora(modules_to_save=["residuals.1"]),
    "the readout": lora(modules_to_save=["readout"]),
    "the expansion": lora(modules_to_save=["expand"]),
}
PROMPTS: dict[str, Any] = {
    "prompt": PromptTuningConfig(num_virtual_tokens=3, **TASK),
    "p-tuning": PromptEncoderConfig(num_virtual_tokens=3, encoder_hidden_size=16, **TASK),
}
# transformers loads adapters with a new enough PEFT alone. With an older one, PEFT's prompts give a
# plain Llama other tokens with a cache than without. The pins fit (tests/release/test_matrix.py);
# `make check-wheel` installs the newest of both.
fits = pytest.mark.skipif(
    Version(peft.__version__) < Version(MIN_PEFT_VERSION),
    reason=f"transformers {transformers.__version__} needs PEFT {MIN_PEFT_VERSION}",
)
every = pytest.mark.parametrize("residual", ["ddl-tc", "hc"])


def base(residual: str = "ddl-tc", **options: Any) -> DDLForCausalLM:
    return from_gpt(model(residual=residual, **options))


def adapted(config: Any, residual: str = "ddl-tc", **options: Any) -> Any:
    """A model with an adapter that changes something."""
    wrapped = get_peft_model(base(residual, **options), config).eval()
    with torch.no_grad():
        for parameter in trained(wrapped).values():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return wrapped


def trained(wrapped: Any) -> dict[str, Tensor]:
    return {name: p for name, p in wrapped.named_parameters() if p.requires_grad}


def continued(model: Any, **options: Any) -> Tensor:
    given = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0, **options}
    prompt = IDX[:, :6]
    return model.generate(input_ids=prompt, attention_mask=torch.ones_like(prompt), **given)


@pytest.mark.parametrize("kind", WORKING)
def test_adapters(kind: str, tmp_path: Path) -> None:
    config = WORKING[kind]
    wrapped, untouched = adapted(config), base()(IDX).logits
    out = wrapped(input_ids=IDX, labels=IDX)
    assert not torch.allclose(out.logits, untouched, atol=1e-2)
    out.loss.backward()
    for name, parameter in trained(wrapped).items():
        assert parameter.grad is not None, name
        assert parameter.grad.any(), name
    assert torch.equal(continued(wrapped), continued(wrapped, use_cache=False))
    with wrapped.disable_adapter():
        torch.testing.assert_close(wrapped(input_ids=IDX).logits, untouched)

    wrapped.save_pretrained(tmp_path / "adapter")
    loaded = PeftModel.from_pretrained(base(), tmp_path / "adapter").eval()
    assert torch.equal(loaded(input_ids=IDX).logits, out.logits)

    merged = wrapped.merge_and_unload()
    assert_close("merged", merged(IDX).logits, out.logits, torch.float32, depth=4)
    assert merged.lm_head.weight is merged.model.wte.weight
    merged.save_pretrained(tmp_path / "merged")
    again = DDLForCausalLM.from_pretrained(tmp_path / "merged").eval()
    assert torch.equal(again(IDX).logits, merged(IDX).logits)
    assert torch.equal(continued(merged), continued(again))


@pytest.mark.parametrize("kind", PROMPTS)
def test_prompts(kind: str, tmp_path: Path) -> None:
    """Virtual tokens come before the others, with a mask of floats."""
    wrapped = adapted(PROMPTS[kind])
    mask = torch.ones_like(IDX)
    out = wrapped(input_ids=IDX, attention_mask=mask, labels=IDX)
    virtual, hf = wrapped.get_prompt(batch_size=2), wrapped.base_model
    embeddings = torch.cat((virtual, hf.model.wte(IDX)), dim=1)
    expected = hf(inputs_embeds=embeddings).logits
    assert torch.equal(out.logits, expected)
    # The first token, too, follows something: the last virtual one.
    losses = F.cross_entropy(expected[:, 2:-1].transpose(1, 2), IDX)
    torch.testing.assert_close(out.loss, losses)
    out.loss.backward()
    assert all(parameter.grad.any() for parameter in trained(wrapped).values())
    wrapped.save_pretrained(tmp_path)
    loaded = PeftModel.from_pretrained(base(), tmp_path).eval()
    assert torch.equal(loaded(input_ids=IDX, attention_mask=mask).logits, out.logits)


@fits
@pytest.mark.parametrize("kind", PROMPTS)
def test_generation_after_prompts(kind: str) -> None:
    wrapped = adapted(PROMPTS[kind])
    assert torch.equal(continued(wrapped), continued(wrapped, use_cache=False))


@every
def test_gradients_of_lora_are_those_of_the_merged_weight(residual: str) -> None:
    """W + s B A has the gradients s G Aᵀ of B and s Bᵀ G of A."""
    wrapped, merged = adapted(lora("c_proj"), residual), adapted(lora("c_proj"), residual)
    for name, parameter in wrapped.named_parameters():
        merged.get_parameter(name).data.copy_(parameter)
    wrapped(input_ids=IDX, labels=IDX).loss.backward()
    plain = merged.merge_and_unload().requires_grad_()
    plain(IDX, labels=IDX).loss.backward()
    for name, layer in wrapped.base_model.model.named_modules():
        if name.endswith("c_proj"):
            A, B = layer.lora_A["default"].weight, layer.lora_B["default"].weight
            G = layer.scaling["default"] * plain.get_parameter(f"{name}.weight").grad
            torch.testing.assert_close(B.grad, G @ A.T, rtol=1e-4, atol=1e-6)
            torch.testing.assert_close(A.grad, B.T @ G, rtol=1e-4, atol=1e-6)


def test_a_gate_of_two_layers_and_one_of_the_state_are_honoured() -> None:
    for options in ({"gate": "mlp"}, {"gate_from": "convolved"}, {"mapping": "v"}):
        config = lora(modules_to_save=["gate", "value"])
        wrapped = adapted(config, **options)
        logits = wrapped(input_ids=IDX).logits
        merged = wrapped.merge_and_unload()
        assert_close("merged", merged(IDX).logits, logits, torch.float32, depth=4)


def test_the_auto_class_finds_the_model_below(tmp_path: Path) -> None:
    base().save_pretrained(tmp_path / "base")
    wrapped = get_peft_model(DDLForCausalLM.from_pretrained(tmp_path / "base"), lora()).eval()
    wrapped.save_pretrained(tmp_path / "adapter")
    loaded = AutoPeftModelForCausalLM.from_pretrained(tmp_path / "adapter").eval()
    assert torch.equal(loaded(input_ids=IDX).logits, wrapped(input_ids=IDX).logits)


@fits
def test_transformers_adds_and_loads_adapters(tmp_path: Path) -> None:
    hf = base()
    hf.add_adapter(lora())
    hf.eval().save_pretrained(tmp_path)
    other = base()
    other.load_adapter(str(tmp_path))
    assert torch.equal(other.eval()(IDX).logits, hf(IDX).logits)
    assert not torch.allclose(hf(IDX).logits, base()(IDX).logits, atol=1e-2)


def test_rewrites_of_an_adapted_model_are_recorded() -> None:
    wrapped = adapted(WORKING["a residual"])
    with record(wrapped) as seen:
        wrapped(input_ids=IDX)
    merged = wrapped.merge_and_unload()
    with record(merged) as expected:
        merged(IDX)
    assert len(seen.sublayers) == len(expected.sublayers) == 4
    # Weights into which an adapter is merged are rounded to float32.
    torch.testing.assert_close(
        seen.statistics("beta"), expected.statistics("beta"), rtol=1.3e-6, atol=1e-5
    )


ONLY_TOKENS = (
    "`wte` and `lm_head` must have no adapter but that of `trainable_token_indices`, because they "
    "share a weight, got PEFT's {}"
)
UNCALLED = (
    "`{}` must be a {} with its own forward, because its parameters are used without calling it, "
    "got {}: to compute a parameter in another way, use torch.nn.utils.parametrize"
)
REFUSED: dict[str, tuple[Any, str]] = {
    "embedding": (lora("wte"), ONLY_TOKENS.format("Embedding and Linear")),
    "head": (lora("lm_head"), ONLY_TOKENS.format("Embedding and Linear")),
    "both": (lora("wte", "lm_head"), ONLY_TOKENS.format("Embedding and Linear")),
    "saved embedding": (
        lora(modules_to_save=["wte"]),
        ONLY_TOKENS.format("ModulesToSaveWrapper and Linear"),
    ),
    "embedding's weight": (
        lora(target_parameters=["wte.weight"]),
        ONLY_TOKENS.format("ParamWrapper and Linear"),
    ),
    "gate's weight": (
        lora(target_parameters=["gate.weight"]),
        UNCALLED.format("gate", "Projection", "ParamWrapper"),
    ),
    "compression": (
        lora(target_parameters=["reads.0.compress_weight"]),
        UNCALLED.format("reads[0]", "Read", "ParamWrapper"),
    ),
    "scaled readout": (
        LNTuningConfig(target_modules=["readout"], **TASK),
        UNCALLED.format("readout", "Read", "LNTuningLayer"),
    ),
    "shared compression": (
        lora(modules_to_save=["reads.0"]),
        "`reads[1]` must share the compression of a read before it, got that of one that was "
        "replaced: replace it, too, by Read(…, shared=stream.reads[…])",
    ),
    "prefix": (
        PrefixTuningConfig(num_virtual_tokens=3, **TASK),
        "`past_key_values` must be a ddl.hf.DDLCache, got DynamicCache: keys and values alone, as "
        "of prefix tuning, lack what the stream keeps of past tokens",
    ),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_would_be_wrong_is_refused(kind: str) -> None:
    config, sentence = REFUSED[kind]
    with pytest.raises((TypeError, ValueError), match=f"^{re.escape(sentence)}$"):
        adapted(config)(input_ids=IDX)


@pytest.mark.parametrize(
    "config", [lora("gate"), IA3Config(target_modules=["value"], feedforward_modules=[], **TASK)]
)
def test_peft_itself_refuses_gates_and_values_as_linears(config: Any) -> None:
    with pytest.raises(ValueError, match=r"^Target module Projection\(.*\) is not supported"):
        adapted(config)


def test_a_gpt() -> None:
    """Its head uses the weight of the embedding, also that of a trained copy."""
    for config in (LoraConfig(target_modules=["c_q"]), lora(modules_to_save=["wte"])):
        config.task_type = None
        gpt: Any = get_peft_model(model(), config)
        with torch.no_grad():
            for parameter in trained(gpt).values():
                parameter.add_(0.2 * torch.randn_like(parameter))
        logits = gpt(IDX).logits
        merged = gpt.merge_and_unload()
        assert isinstance(merged, GPT)
        assert_close("merged", merged(IDX).logits, logits, torch.float32, depth=4)
    gpt = get_peft_model(model(), LoraConfig(target_modules=["wte"]))
    sentence = UNCALLED.format("wte", "Embedding", "peft.tuners.lora.layer.Embedding")
    with pytest.raises(TypeError, match=f"^{re.escape(sentence)}$"):
        gpt(IDX)
