"""Converted decoders compute the equations; at first they compute what they did before."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch

from ddl import hf
from ddl.optim import matrices_and_others, never_decayed
from tests.support.decoder_cases import (
    FAMILIES,
    VARIANTS,
    converted,
    loss_of,
    plain,
    tokens,
    written_out,
)
from tests.support.helpers import gradients
from tests.support.sampling import few

every_variant = pytest.mark.parametrize("variant", VARIANTS)
every_family = pytest.mark.parametrize("family", few(FAMILIES, "Qwen3", "GPT2"))
STARTS: dict[str, dict[str, Any]] = {
    "scalar": {},
    "channel": {"value_channels": 4},
    "three": {"value_channels": 3},
    "token and conv": {"value_channels": 2, "compress": "token", "expand": "conv"},
    "write only": {"value_channels": 2, "erase": "none"},
    "adapter": {"value_channels": 4, "train": "stream"},
}


@every_variant
def test_a_converted_llama_computes_the_equations(variant, monkeypatch):
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)  # rotary tables are float32
    model, idx = converted(variant).double(), tokens()
    share = 0.25 if variant == "annealed" else None
    expected = written_out(model, idx, share)
    torch.testing.assert_close(model(idx).logits, expected, rtol=1e-9, atol=1e-9)
    model.requires_grad_(True)
    found = gradients(loss_of(model(idx).logits, idx)[None], {}, model)
    by_hand = gradients(loss_of(written_out(model, idx, share), idx)[None], {}, model)
    for name, gradient in by_hand.items():
        assert gradient.any(), name
        torch.testing.assert_close(found[name], gradient, rtol=1e-7, atol=1e-11, msg=name)


@every_family
@pytest.mark.parametrize("options", STARTS.values(), ids=STARTS)
def test_a_model_computes_at_first_what_it_did(family, options):
    model, idx = plain(family), tokens()
    before = model(idx).logits
    assert hf.convert(model, **options) is model
    torch.testing.assert_close(model(idx).logits, before, rtol=1e-5, atol=1e-6)
    if options.get("value_channels", 1) in (1, 2, 4):  # whose mean of equal numbers is exact
        assert torch.equal(model(idx).logits, before)


@every_family
def test_names_and_numbers_stay_and_what_is_new_is_marked(family):
    model = plain(family)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    after = torch.rand(1, generator=torch.Generator().manual_seed(3))
    torch.manual_seed(3)
    hf.convert(model, value_channels=2, expand="conv")
    assert torch.equal(torch.rand(1), after)  # torch's random state
    state = model.state_dict()
    assert all(torch.equal(state[name], value) for name, value in before.items())
    new = {name for name, p in model.named_parameters() if name not in before}
    marked = {id(p) for p in never_decayed(model)}
    assert new
    assert new == {name for name, p in model.named_parameters() if id(p) in marked}
    assert model.of_stream() == state.keys() - before.keys()
    hidden, _ = matrices_and_others(model)
    assert not {id(p) for group in hidden for p in group["params"]} & marked


def test_half_precision_models_have_streams_in_float32():
    model = plain().bfloat16()
    before = model(tokens()).logits
    hf.convert(model, value_channels=4)
    assert {p.dtype for p in never_decayed(model)} == {torch.float32}
    assert torch.equal(model(tokens()).logits, before)  # in the model's own order of roundings
    assert model.dtype == torch.bfloat16


@pytest.mark.parametrize("variant", ["token and conv", "adapter"])
def test_hidden_states_are_raw_reads(variant):
    model, idx = converted(variant), tokens()
    found = model(idx, output_hidden_states=True).hidden_states
    assert [state.shape for state in found] == [(2, 9, 32)] * 3
    torch.testing.assert_close(model.lm_head(found[-1]), model(idx).logits)
    states = []
    model.model.layers[1].register_forward_pre_hook(lambda _, args: states.append(args[0].tensor()))
    model(idx)
    _, raw = model.model.norm.readout(states[0], return_compressed=True)
    torch.testing.assert_close(found[1], raw)
    (_, states) = model(idx, return_dict=False, use_cache=False, output_hidden_states=True)
    assert all(torch.equal(*pair) for pair in zip(states, found, strict=True))


@pytest.mark.parametrize("variant", ["channel", "token and conv"])
def test_a_state_that_is_looked_at_between_layers_changes_no_gradient(variant):
    """In the middle of a chain of rewrites, of which only every eighth state is stored."""
    model, idx = converted(variant, num_hidden_layers=3), tokens()
    expected = gradients(loss_of(model(idx).logits, idx)[None], {}, model)
    looked: list[torch.Size] = []
    model.model.layers[1].register_forward_pre_hook(
        lambda _, args: looked.append(args[0].tensor().shape)
    )
    found = gradients(loss_of(model(idx).logits, idx)[None], {}, model)
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, msg=name)


@every_variant
def test_copies_and_pickles_are_models_of_their_own(variant):
    model, idx = converted(variant), tokens()
    expected = model(idx).logits
    assert {module.training for module in model.modules()} == {False}
    for same in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert type(same) is type(model)
        assert torch.equal(same(idx).logits, expected)
        with torch.no_grad():
            next(same.model.layers[0].res_1.parameters()).add_(5)  # it is not shared
        assert torch.equal(model(idx).logits, expected)


@pytest.mark.parametrize("family", few(["Llama", "GPT2"], "GPT2"))
@pytest.mark.parametrize("variant", few(["channel", "token and conv", "adapter"], "token and conv"))
def test_a_compiled_model_is_one_graph(family, variant):
    torch._dynamo.reset()
    model, idx = converted(variant, family), tokens()
    whole = torch.compile(model, fullgraph=True, backend="aot_eager")
    logits = whole(idx, use_cache=False).logits
    torch.testing.assert_close(logits, model(idx).logits)
    logits.square().mean().backward()
    assert (
        model.get_submodule(model.structure.decoder)
        .get_parameter(f"{model.structure.layers}.0.res_2.value.weight")
        .grad.any()
    )
