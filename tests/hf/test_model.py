"""DDLForCausalLM equals GPT bit for bit, and has the interface of Hugging Face's models."""

from __future__ import annotations

import copy
import re
from typing import Any, get_args

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, DynamicCache

from ddl.hf import DDLConfig, DDLForCausalLM, from_gpt
from ddl.hf.cache import CACHE
from ddl.hf.modeling import to_gpt
from ddl.lab.config import RESIDUALS
from ddl.models import GPT
from ddl.models.streams.attention_residual import AttentionResidualStream, attend
from ddl.models.streams.connected import ConnectedStream
from ddl.models.streams.controls import ConvolvedStream, ExpandedStream
from ddl.nn.stream import DeltaStream
from ddl.options import Residual, quoted
from tests.support.hf_cases import DEPTH, VARIANTS, model, nanogpt, padded, small, tokens
from tests.support.tolerances import assert_close

every_variant = pytest.mark.parametrize("options", VARIANTS.values(), ids=VARIANTS)
every_residual = pytest.mark.parametrize("residual", RESIDUALS)
IDX = tokens(3, 24)


def wrapped(**options: Any) -> DDLForCausalLM:
    return from_gpt(model(**options))


# --- the same model -------------------------------------------------------------------------------


@every_variant
def test_a_new_model_is_gpts(options: dict[str, Any]) -> None:
    config = small(**options)
    torch.manual_seed(3)
    expected = GPT(config)
    torch.manual_seed(3)
    new = AutoModelForCausalLM.from_config(DDLConfig.from_gpt(config))
    state = new.state_dict()
    assert state.pop("lm_head.weight") is not None
    assert list(state) == [f"model.{name}" for name in expected.state_dict()]
    for name, tensor in expected.state_dict().items():
        assert torch.equal(state[f"model.{name}"], tensor), name
    assert new.num_parameters() == expected.num_parameters()


@every_variant
def test_logits_and_loss_are_gpts(options: dict[str, Any]) -> None:
    gpt = model(**options)
    expected = gpt(IDX, IDX)
    out = from_gpt(gpt)(IDX, labels=IDX)
    assert torch.equal(out.logits, expected.logits)
    torch.testing.assert_close(out.loss, expected.loss)
    assert torch.equal(to_gpt(from_gpt(gpt))(IDX).logits, expected.logits)


def test_labels_are_shifted_and_counted() -> None:
    hf = wrapped()
    labels = IDX.clone()
    labels[0, :10] = -100
    logits = hf(IDX).logits
    losses = F.cross_entropy(logits[:, :-1].transpose(1, 2), labels[:, 1:], reduction="none")
    assert (losses == 0).sum() == 9
    mean, total = losses.sum() / (3 * 23 - 9), losses.sum()
    torch.testing.assert_close(hf(IDX, labels=labels).loss, mean)
    torch.testing.assert_close(hf(IDX, labels=labels, num_items_in_batch=50).loss, total / 50)


@pytest.mark.parametrize("kind", ["GPT", "nanoGPT"])
def test_decoder_and_head(kind: str) -> None:
    """The parts that trl, Liger and serving engines look for."""
    hf: Any = wrapped() if kind == "GPT" else from_gpt(nanogpt())
    decoder = hf.get_decoder()
    assert decoder is hf.base_model is getattr(hf, hf.base_model_prefix)
    h = decoder(IDX).last_hidden_state
    assert torch.equal(hf.get_output_embeddings()(h), hf(IDX).logits)
    assert decoder(IDX, return_dict=False)[0].shape == h.shape
    assert type(AutoModel.from_config(hf.config)) is type(decoder)
    assert hf.get_input_embeddings() is decoder.get_input_embeddings() is decoder.wte


def test_a_decoder_saved_by_itself_becomes_a_model_with_its_head(tmp_path: Any) -> None:
    hf = wrapped()
    hf.model.save_pretrained(tmp_path / "decoder")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "decoder")
    assert torch.equal(again(IDX).logits, hf(IDX).logits)
    hf.save_pretrained(tmp_path / "whole")
    decoder = AutoModel.from_pretrained(tmp_path / "whole")
    assert torch.equal(decoder(IDX).last_hidden_state, hf.model(IDX).last_hidden_state)


def test_the_module_is_shared() -> None:
    gpt = model()
    hf = from_gpt(gpt)
    assert hf.model.wte.weight is gpt.wte.weight
    assert hf.lm_head.weight is gpt.wte.weight
    assert to_gpt(hf).trunk is gpt.trunk
    assert hf.training == gpt.training
    assert from_gpt(gpt.train()).training


def test_a_copy_computes_the_same() -> None:
    hf = wrapped(residual="ddl-tc")
    clone = copy.deepcopy(hf)
    assert torch.equal(clone(IDX).logits, hf(IDX).logits)
    assert clone.lm_head.weight is clone.model.wte.weight
    clone.model.wte.weight.data.zero_()
    assert hf.model.wte.weight.any()


# --- arguments ------------------------------------------------------------------------------------


@every_variant
@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_changes_nothing(options: dict[str, Any], side: str) -> None:
    hf = wrapped(**options)
    lengths = [24, 1, 9]
    ids, mask = padded(IDX, lengths, side)
    logits = hf(ids, attention_mask=mask).logits
    for row, length in enumerate(lengths):
        alone = hf(IDX[row : row + 1, :length]).logits[0]
        assert_close(f"row {row}", logits[row][mask[row].bool()], alone, torch.float32, depth=DEPTH)


def test_which_logits_are_kept() -> None:
    hf = wrapped()
    logits = hf(IDX).logits
    # A matrix product of fewer rows may round differently.
    torch.testing.assert_close(hf(IDX, logits_to_keep=5).logits, logits[:, -5:])
    chosen = torch.tensor([3, 0, 23])
    torch.testing.assert_close(hf(IDX, logits_to_keep=chosen).logits, logits[:, chosen])


def test_embeddings_in_place_of_tokens() -> None:
    hf = wrapped()
    assert torch.equal(hf(inputs_embeds=hf.model.wte(IDX)).logits, hf(IDX).logits)


def test_tuples_on_demand() -> None:
    hf = wrapped()
    loss, logits = hf(IDX, labels=IDX, return_dict=False)
    assert loss.ndim == 0
    assert torch.equal(logits, hf(IDX)[0])
    hf.config.return_dict = False
    assert torch.equal(logits, hf(IDX)[0])


@every_residual
def test_hidden_states(residual: str) -> None:
    """Hidden states are the inputs of each block's attention, and the final read."""
    hf = wrapped(residual=residual)
    out = hf(IDX, output_hidden_states=True)
    expected, trunk, x = [], hf.model.trunk, hf.model.wte(IDX)
    if isinstance(trunk, DeltaStream):
        x = trunk.expand(x)
        for index, (read, part) in enumerate(zip(trunk.reads, trunk.sublayers, strict=True)):
            h = read(x)
            expected += [h] * (index % 2 == 0)
            x = trunk.residuals[index](x, part(h), context=h)
    elif isinstance(trunk, ConnectedStream):
        state = torch.stack([x] * 4, dim=-2)
        for index, (norm, part) in enumerate(zip(trunk.norms, trunk.sublayers, strict=True)):
            h, state, weights, _ = trunk.connections[index](state)
            expected += [norm(h)] * (index % 2 == 0)
            state = state + weights[..., None] * part(norm(h))[..., None, :]
        x = trunk.head(state)
    elif isinstance(trunk, AttentionResidualStream):
        sums, read = [x], x
        for index, (norm, part) in enumerate(zip(trunk.norms, trunk.sublayers, strict=True)):
            expected += [norm(read)] * (index % 2 == 0)
            sums.append(part(norm(read)))
            read = attend(sums, trunk.queries[index], trunk.norm_eps)
        x = read
    elif isinstance(trunk, ConvolvedStream):
        for index, (read, part) in enumerate(zip(trunk.reads, trunk.sublayers, strict=True)):
            expected += [read(x)] * (index % 2 == 0)
            x = x + part(read(x))
    elif isinstance(trunk, ExpandedStream):
        x = torch.stack([x] * 4, dim=-1)
        for index, (read, part) in enumerate(zip(trunk.reads, trunk.sublayers, strict=True)):
            h = read(x)
            expected += [h] * (index % 2 == 0)
            x = x + part(h)[..., None] * trunk.residuals[index](h)[..., None, :]
    else:
        for index, (norm, part) in enumerate(zip(trunk.norms, trunk.sublayers, strict=True)):
            expected += [norm(x)] * (index % 2 == 0)
            x = x + part(norm(x))
    expected.append(trunk.readout(x))
    assert len(out.hidden_states) == 3
    for number, (state, reference) in enumerate(zip(out.hidden_states, expected, strict=True)):
        assert_close(f"state {number}", state, reference, torch.float32, depth=DEPTH)
    assert torch.equal(hf.lm_head(out.hidden_states[-1]), out.logits)
    assert hf(IDX).hidden_states is None
    assert len(hf.model.trunk.sublayers[0]._forward_pre_hooks) == 0
    hf.config.output_hidden_states = True
    assert len(hf(IDX).hidden_states) == 3


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({}, "`input_ids` or `inputs_embeds` must be given, got neither"),
        (
            {"input_ids": IDX, "inputs_embeds": torch.zeros(1, 1, 32)},
            "`input_ids` or `inputs_embeds` must be given, got both",
        ),
        (
            {"input_ids": IDX[0]},
            "`input_ids` must have shape (batch, 1 to max_position_embeddings = 40), got (24,)",
        ),
        (
            {"inputs_embeds": torch.zeros(1, 41, 32)},
            "`inputs_embeds` must have shape (batch, 1 to max_position_embeddings = 40,"
            " hidden_size), got (1, 41, 32)",
        ),
        (
            {"input_ids": torch.full((2, 4), 100)},
            "`input_ids` must hold tokens from 0 to vocab_size - 1 = 60, got 100",
        ),
        (
            {"input_ids": IDX, "output_attentions": True},
            "`output_attentions` must be false, got True: attention weights are not returned",
        ),
        (
            {"input_ids": IDX, "attention_mask": torch.ones(3, 1, 24, 24)},
            "`attention_mask` must have shape (3, 24), got (3, 1, 24, 24)",
        ),
        (
            {"input_ids": IDX, "past_key_values": DynamicCache()},
            f"`{CACHE}` must be a ddl.hf.DDLCache, got DynamicCache: keys and values alone, "
            "as of prefix tuning, lack what the stream keeps of past tokens",
        ),
    ],
)
def test_refusals(arguments: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(sentence)}$"):
        wrapped()(**arguments)


# --- config ---------------------------------------------------------------------------------------


def test_config_names() -> None:
    config = DDLConfig(num_hidden_layers=3, num_attention_heads=2, max_position_embeddings=24)
    assert (config.num_layers, config.num_heads, config.block_size) == (3, 2, 24)
    assert (config.num_hidden_layers, config.max_position_embeddings) == (3, 24)
    assert config.num_attention_heads == 2
    assert config.head_dim == 384
    assert config.gpt == DDLConfig.from_gpt(config.gpt).gpt


@every_variant
def test_config_json(options: dict[str, Any], tmp_path: Any) -> None:
    config = DDLConfig(**small(**options).__dict__, eos_token_id=5)
    config.save_pretrained(tmp_path)
    again = AutoConfig.from_pretrained(tmp_path)
    assert type(again) is DDLConfig
    assert again.gpt == config.gpt == small(**options)
    assert again.eos_token_id == 5
    assert again.pad_token_id is None


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (
            {"residual": "sum"},
            f"`residual` must be {quoted(get_args(Residual))}, got 'sum'",
        ),
        (
            {"num_hidden_layers": 0},
            "`num_layers` must be an integer of at least 1, got 0",
        ),
        ({"gate_hidden": 3}, '`gate_hidden` must be left at 128 unless gate="mlp", got 3'),
        (
            {"gate_hiden": 3},
            "`gate_hiden` must be a field of DDLConfig, got an unknown one: did you mean "
            "`gate_hidden`?",
        ),
        (
            {"num_hidden_layer": 3},
            "`num_hidden_layer` must be a field of DDLConfig, got an unknown one: did you mean "
            "`num_hidden_layers`?",
        ),
        (
            {"dropout": 0.1},
            "`dropout` must be a field of DDLConfig, got an unknown one; if a newer ddl-rs wrote "
            "it, install that version",
        ),
        (
            {"head_dim": 8},
            "`head_dim` must be a field of DDLConfig, got an unknown one: did you mean "
            "`head_size`?",
        ),
        (
            {"tie_word_embeddings": False},
            "`tie_word_embeddings` must be true, got false: the head is the embedding itself",
        ),
    ],
)
def test_config_refusals(options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(sentence)}$"):
        DDLConfig(**options)


def test_what_transformers_takes_and_stores_is_kept(tmp_path: Any) -> None:
    """Fields of other versions of transformers are kept, so that every saved config loads."""
    given = {
        "_commit_hash": "1a2b", "architectures": ["DDLForCausalLM"], "auto_map": {"x": "y"},
        "bos_token_id": 1, "dtype": "bfloat16", "eos_token_id": 2, "id2label": {"0": "a", "1": "b"},
        "label2id": {"a": 0, "b": 1}, "max_length": 20, "model_type": "ddl", "name_or_path": "here",
        "output_attentions": False, "output_hidden_states": True, "pad_token_id": None,
        "quantization_config": {"quant_method": "none"}, "return_dict": True, "temperature": 1.0,
        "tie_word_embeddings": True, "tokenizer_class": None, "torch_dtype": "bfloat16",
        "transformers_version": "5.0.0", "use_cache": True,
    }  # fmt: skip
    config = DDLConfig(**given, num_layers=3)
    config.save_pretrained(tmp_path)
    again = AutoConfig.from_pretrained(
        tmp_path, attn_implementation="eager", trust_remote_code=False
    )
    assert again.to_dict().keys() >= config.to_dict().keys() - {"auto_map"}
    assert (again.num_layers, again.dtype, again.output_hidden_states) == (3, torch.bfloat16, True)


def test_a_subclass_brings_fields_of_its_own() -> None:
    class Longer(DDLConfig):
        def __init__(self, stride: int = 1, **options: Any) -> None:
            self.stride = stride
            super().__init__(**options)

    assert Longer(stride=2).stride == 2
    with pytest.raises(
        ValueError, match=r"^`strid` must be a field of Longer, got an unknown one; "
    ):
        Longer(strid=2)
