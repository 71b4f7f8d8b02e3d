"""The recipe of the published code makes the model that `ddl import` makes of its defaults."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import pytest
import torch

from ddl.errors import InputError
from ddl.lab.config import PRESETS, GPTConfig, paper_code
from ddl.lab.config.recipes import PAPER_CODE
from ddl.models import GPT
from ddl.paper import convert, revert
from tests.paper.test_paper import VARIANTS
from tests.support.paper_standin import PublishedGPT

MEDIUM = {"num_hidden_layers": 24, "num_attention_heads": 8, "hidden_size": 1024}


def published_config(variant: str, **options: Any) -> GPTConfig:
    with torch.device("meta"):
        made = convert(PublishedGPT(variant, **options).state_dict(), options)[0]
    return replace(made, initial_weights="paper-code")  # which a checkpoint does not say


@pytest.mark.parametrize(("preset", "sizes"), [("small", {}), ("medium", MEDIUM)])
@pytest.mark.parametrize("variant", VARIANTS)
def test_the_model_is_that_of_an_import(variant: str, preset: str, sizes: dict[str, Any]) -> None:
    training = paper_code(PRESETS[preset], {"residual": VARIANTS[variant]})
    assert training.model == published_config(variant, **sizes)
    # Nothing else changes, so the papers' schedule stays.
    optim = replace(training.optim, decay="sublayers")
    assert replace(training, model=PRESETS[preset].model, optim=optim) == PRESETS[preset]
    assert training.optim.decay == "matrices"


@pytest.mark.parametrize(
    ("variant", "given", "published"),
    [
        ("cc-ec", {"value_channels": 2}, {"ddl_value_channels": 2}),  # its kernel follows
        ("tc-ec", {"value_channels": 2}, {"ddl_value_channels": 2}),
        ("cc", {"value": "constant"}, {"ddl_v_constant": True}),
        ("ddl", {"value": "linear"}, {"ddl_v_sigmoid": False}),
        ("tc", {"gate": "mlp", "beta_init": 0}, {"ddl_beta_init": 0, "ddl_beta_single_linear": 0}),
    ],
)
def test_with_other_options_it_is_still_that_of_an_import(
    variant: str, given: dict[str, Any], published: dict[str, Any]
) -> None:
    if variant == "cc-ec":
        published = published | {"ddl_state_shortconv_kernel_size": 2}
    training = paper_code(PRESETS["small"], {"residual": VARIANTS[variant], **given})
    assert training.model == published_config(variant, **published)


def test_an_option_of_the_recipe_without_effect_keeps_its_default() -> None:
    def of(**given: Any) -> GPTConfig:
        return paper_code(PRESETS["tiny"], given).model

    additive = replace(PRESETS["tiny"].model, residual="additive", initial_weights="paper-code")
    assert of(residual="additive") == additive
    assert of(residual="hc") == replace(PRESETS["tiny"].model, residual="hc")
    assert of(mapping="v").value_from == "context"
    scaled = of(parameterization="mup", base_width=64)
    assert scaled.initial_weights == "standard"
    direct = of(compress_parameterization="direct", value_channels=2)
    assert (direct.compress_parameterization, direct.compress_kernel_size) == ("direct", 4)
    with pytest.raises(InputError, match=r"^`value_channels` must be left at 4 unless residual="):
        of(residual="ddl", value_channels=2)


@pytest.mark.parametrize("name", PAPER_CODE)
def test_what_is_given_wins(name: str) -> None:
    others = {
        "eps_k": 0.5, "value": "linear", "value_scale": 2.0, "value_from": "context",
        "compress_parameterization": "direct", "initial_weights": "standard",
    }  # fmt: skip
    given = {name: others[name]}
    model = paper_code(PRESETS["tiny"], given).model
    assert getattr(model, name) == others[name] != PAPER_CODE[name]
    usual = paper_code(PRESETS["tiny"]).model
    changed = {f.name for f in fields(model) if getattr(model, f.name) != getattr(usual, f.name)}
    assert changed == {name}


def test_its_models_can_be_written_in_the_published_format() -> None:
    for residual in VARIANTS.values():
        model = GPT(paper_code(PRESETS["tiny"], {"residual": residual}).model)
        their_config, theirs = revert(model.config, model.state_dict())
        config, state = convert(theirs, their_config)
        assert replace(config, initial_weights="paper-code") == model.config
        for name, tensor in model.state_dict().items():
            assert torch.equal(state[name], tensor)
