"""What cannot be converted is refused by the layer's name, and nothing is changed."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import transformers
from torch import nn

from ddl import hf
from ddl.hf.cache import CACHE
from tests.support.decoder_cases import SIZES, plain, tokens

OTHERWISE = {
    "post-norms": ("Gemma2", {"head_dim": 8}, "model.model.layers[0]"),
    "no pre-norms": ("Olmo2", {}, "model.model.layers[0]"),
    "parallel sublayers": ("GPTNeoX", {}, "model.gpt_neox.layers[0]"),
    "one norm": ("Phi", {}, "model.model.layers[0]"),
    "a multiplier": ("Granite", {"residual_multiplier": 0.5}, "model.model.layers[0]"),
    "a decoder in a decoder": ("OPT", {"ffn_dim": 48}, "model.model.decoder.layers[0]"),
}
OPTIONS: dict[str, tuple[dict[str, Any], str]] = {
    "start": ({"start": "ddl"}, r"`start` must be \"additive\" or None, got"),
    "train": ({"train": "lora"}, r"`train` must be \"all\" or \"stream\", got 'lora'"),
    "steps": ({"anneal_steps": 0}, "`anneal_steps` must be an integer of at least 1, got 0"),
    "steps of none": (
        {"start": None, "anneal_steps": 5},
        r"`anneal_steps` must be left out unless start=\"additive\" and train=\"all\", got 5",
    ),
    "steps of an adapter": (
        {"train": "stream", "anneal_steps": 5},
        r"`anneal_steps` must be left out unless start=\"additive\" and train=\"all\", got 5",
    ),
    "an adapter from the start": (
        {"train": "stream", "start": None},
        r"`start` must be \"additive\" with train=\"stream\", got None",
    ),
    "erase": ({"erase": "separate"}, r"`erase` must be \"tied\" or \"none\", got"),
    "a read that is no mean": (
        {"value_channels": 2, "compress": "channel", "read_init": 1.0},
        r"`read_init` must be left out with start=\"additive\", got 1.0",
    ),
    "channels": ({"value_channels": 0}, "`value_channels` must be an integer of at least 1"),
}


@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize(("family", "options", "name"), OTHERWISE.values(), ids=OTHERWISE)
def test_layers_that_are_built_otherwise(family, options, name, zeros):
    config = getattr(transformers, f"{family}Config")(**{**SIZES, **options})
    model = transformers.AutoModelForCausalLM.from_config(config)
    for parameter in model.parameters() if zeros else ():
        nn.init.zeros_(parameter)
    kind, names = type(model), model.state_dict().keys()
    sentence = f"`{name}` must be x + F(norm(x)) twice, attention and MLP"
    with pytest.raises(ValueError, match=f"^{re.escape(sentence)}"):
        hf.convert(model)
    assert type(model) is kind
    assert model.state_dict().keys() == names
    assert not any(module._forward_pre_hooks for module in model.modules())
    model(tokens())


def test_a_layer_among_others():
    """The third of three has a multiplier; it is the one that is named."""
    model = plain(num_hidden_layers=3)
    forward = model.model.layers[2].mlp.forward
    model.model.layers[2].mlp.register_forward_hook(lambda *args: None)
    hf.convert(plain(num_hidden_layers=3))  # a hook alone is no difference

    class Doubled(type(model.model.layers[2])):  # type: ignore[misc]
        def forward(self, x: Any, **kwargs: Any) -> Any:
            x = x + self.self_attn(hidden_states=self.input_layernorm(x), **kwargs)[0]
            return x + 2 * forward(self.post_attention_layernorm(x))

    model.model.layers[2].__class__ = Doubled
    with pytest.raises(ValueError, match=r"^`model.model.layers\[2\]` must be x \+ F\(norm\(x\)\)"):
        hf.convert(model)


@pytest.mark.parametrize(("options", "sentence"), OPTIONS.values(), ids=OPTIONS)
def test_options_that_do_not_fit(options, sentence):
    model = plain()
    before = str(model)
    with pytest.raises(ValueError, match=f"^{sentence}"):
        hf.convert(model, **options)
    assert str(model) == before


def test_options_that_the_model_sets_or_nobody_has():
    with pytest.raises(TypeError, match=r"^`norm_eps` must be left to the model, got 0.1"):
        hf.convert(plain(), norm_eps=0.1)
    with pytest.raises(TypeError, match=r"value_chanels"):
        hf.convert(plain(), value_chanels=4)


def test_models_that_are_no_decoders():
    model: Any
    for model in (nn.Linear(2, 2), plain().model, torch.compile(plain())):
        with pytest.raises(TypeError, match=r"^`model` must be a causal language model of transfo"):
            hf.convert(model)
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(plain().config)
    with pytest.raises(TypeError, match=r"^`model` must have its parameters in memory, got som"):
        hf.convert(model)
    with pytest.raises(ValueError, match=r"^`model` must be as transformers made it, got one alre"):
        hf.convert(hf.convert(plain()))
    for name in ("norm", "layers.1.post_attention_layernorm"):
        model = plain()
        norm = model.model.get_submodule(name)
        norm.forward = norm.forward.__func__.__get__(norm)  # the class's own may stand there
        before = str(model)
        norm.forward = lambda x: x
        with pytest.raises(TypeError, match=r"^`LlamaRMSNorm` must have its class's forward, got"):
            hf.convert(model)
        assert str(model) == before


def test_a_decoder_that_keeps_its_cache_by_another_name():
    """Its past of the stream would not be found."""
    sizes = {"n_layer": 2, "n_head": 4, "n_embd": 32, "n_positions": 64, "vocab_size": 61}
    make = transformers.AutoModelForCausalLM.from_config
    model = make(transformers.GPTBigCodeConfig(**sizes)).eval()
    with pytest.raises(ValueError, match=rf"^`model` must give its layers `{CACHE}` if reads"):
        hf.convert(model, compress="token")
    expected = model(tokens()).logits
    torch.testing.assert_close(hf.convert(model)(tokens()).logits, expected)


def test_under_other_contexts_it_is_made_the_same():
    base = plain()
    with torch.inference_mode():
        model = hf.convert(base, value_channels=2)
    model(tokens(), labels=tokens()).loss.backward()
    base = plain()
    with torch.device("meta"):
        model = hf.convert(base, value_channels=2)
    assert not any(parameter.is_meta for parameter in model.parameters())


def test_a_stream_knows_nothing_else():
    model = hf.convert(plain())
    streams: list[Any] = []
    model.model.layers[1].register_forward_pre_hook(lambda _, args: streams.append(args[0]))
    model(tokens())
    (stream,) = streams
    assert (stream.shape, stream.dtype, stream.device.type) == ((2, 9, 32), torch.float32, "cpu")
    for act in (lambda: 2 * stream, lambda: torch.relu(stream), lambda: torch.ones(3) - stream):
        with pytest.raises(TypeError):
            act()
    for act in (lambda: stream.to(torch.float64), lambda: stream.to("cpu", torch.float64)):
        with pytest.raises(TypeError):
            act()
    assert stream.to("cpu", non_blocking=True) is stream
    with pytest.raises(AttributeError, match=r"^a Stream has no 'view': .* as Liger's kernels do"):
        stream.view(-1)
    with pytest.raises(TypeError, match=r"^a Stream must be read by a norm before something is ad"):
        stream + torch.zeros(2, 9, 32)
