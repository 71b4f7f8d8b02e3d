"""DDLForCausalLM's parameters: dtypes, gradients, number, and initialisation of new ones."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from ddl.hf import DDLConfig, DDLForCausalLM, from_gpt
from ddl.lab.config import RESIDUALS, STREAMS
from ddl.models import GPT
from tests.support.hf_cases import (
    CHECKPOINTING,
    DEPTH,
    HAS_NEW_NAME,
    VARIANTS,
    VOCABULARY,
    model,
    small,
    tokens,
)
from tests.support.tolerances import assert_close

every_variant = pytest.mark.parametrize("options", VARIANTS.values(), ids=VARIANTS)
every_residual = pytest.mark.parametrize("residual", RESIDUALS)
IDX = tokens(3, 24)
WITH_MAPS = ("mhc", "independent-hc")  # which stay in float32, as in the models that they are from


def wrapped(**options: Any) -> DDLForCausalLM:
    return from_gpt(model(**options))


# --- precision ------------------------------------------------------------------------------------


def gates(hf: DDLForCausalLM) -> set[str]:
    """Names of the decoder's parameters in float32."""
    return {name for name, p in hf.model.named_parameters() if p.dtype == torch.float32}


@every_variant
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_gates_and_values_stay_float32(
    options: dict[str, Any], dtype: torch.dtype, tmp_path: Any
) -> None:
    gpt = model(noise=0.1, **options)
    from_gpt(gpt).save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=dtype)
    expected = {
        name
        for name, _ in gpt.named_parameters()
        if re.match(r"trunk\.residuals\.\d+\.(gate|value)\.", name)
        or (re.search(r"\.(map|base|scale)$", name) and options["residual"] in WITH_MAPS)
        or re.search(r"\.mixer\.(gate|decay)\.", name)
    }
    assert bool(expected) == (
        options["residual"] in (*STREAMS, "expanded", *WITH_MAPS) or "mixer" in options
    )
    assert gates(loaded) == expected
    kept = loaded._keep_in_fp32_modules_strict
    assert {n for n in gpt.state_dict() if any(re.search(k, n) for k in kept)} == expected
    assert {p.dtype for p in loaded.parameters()} <= {dtype, torch.float32}
    for name, parameter in loaded.model.named_parameters():
        exact = gpt.get_parameter(name)
        assert torch.equal(parameter, exact if name in expected else exact.to(dtype)), name
    made = AutoModelForCausalLM.from_config(DDLConfig.from_gpt(gpt.config), dtype=dtype)
    assert gates(made) == expected
    depth = DEPTH + 4 * (gpt.config.rewrites - 1)  # each further direction is a product, too
    assert_close("logits", loaded(IDX).logits, gpt(IDX).logits, dtype, depth=depth)
    loaded(IDX, labels=IDX).loss.backward()
    for name, parameter in loaded.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name


# --- training -------------------------------------------------------------------------------------


def step(hf: DDLForCausalLM) -> tuple[dict[str, torch.Tensor], int]:
    """Return the gradients of one pass, and the bytes that autograd saved for the backward."""
    kept = 0

    def pack(x: torch.Tensor) -> torch.Tensor:
        nonlocal kept
        kept += x.numel() * x.element_size()
        return x

    hf.zero_grad()
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        loss = hf(IDX, labels=IDX).loss
    loss.backward()
    return {n: p.grad.clone() for n, p in hf.named_parameters() if p.grad is not None}, kept


@every_variant
@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_computes_the_same_from_less(
    options: dict[str, Any], reentrant: bool
) -> None:
    hf = wrapped(**options).train()
    expected, stored = step(hf)
    getattr(hf, f"{CHECKPOINTING}_enable")({"use_reentrant": reentrant})
    assert getattr(hf, f"is_{CHECKPOINTING}")
    gradients, kept = step(hf)
    assert gradients.keys() == expected.keys() == dict(hf.named_parameters()).keys()
    for name, gradient in expected.items():  # reentrant checkpointing sums in another order
        assert_close(name, gradients[name], gradient, torch.float32, gradient=True)
        assert reentrant or torch.equal(gradients[name], gradient), name
    assert kept < 0.8 * stored
    getattr(hf, f"{CHECKPOINTING}_disable")()
    assert step(hf)[1] == stored


@pytest.mark.skipif(not HAS_NEW_NAME, reason="this version has the old name alone")
def test_checkpointing_by_its_old_name() -> None:
    hf = wrapped().train()
    stored = step(hf)[1]
    with pytest.warns(FutureWarning):
        hf.gradient_checkpointing_enable()
    assert step(hf)[1] < 0.8 * stored
    hf.eval()
    assert step(hf)[1] == stored


# --- other embeddings, missing parameters ---------------------------------------------------------


def test_new_tokens_start_like_the_others() -> None:
    hf = wrapped()
    hf.resize_token_embeddings(5000, mean_resizing=False)
    assert hf.model.wte.weight[VOCABULARY:].std().item() == pytest.approx(0.02, rel=0.01)


@every_residual
def test_what_a_checkpoint_lacks_is_drawn_as_gpt_draws_it(residual: str, tmp_path: Any) -> None:
    """Load a `ddl` checkpoint into a model with a compression and expansion, or without gates."""
    source = from_gpt(model(residual="ddl"))
    source.save_pretrained(tmp_path)
    config = DDLConfig(**small(residual=residual).__dict__)
    hf = DDLForCausalLM.from_pretrained(tmp_path, config=config, ignore_mismatched_sizes=True)
    torch.manual_seed(0)
    fresh = GPT(small(residual=residual))
    have = dict(source.model.named_parameters())
    for name, parameter in hf.model.named_parameters():
        start = fresh.get_parameter(name)
        assert not parameter.is_meta
        if name in have and have[name].shape == parameter.shape:
            assert torch.equal(parameter, have[name]), name
        elif start.numel() == 1 or start.std() == 0 or "compress" in name or "expand" in name:
            assert torch.equal(parameter, start), name  # not random
        else:
            assert parameter.std().item() == pytest.approx(start.std().item(), rel=0.3), name
    assert hf(IDX).logits.isfinite().all()


def test_a_gate_that_a_checkpoint_lacks(tmp_path: Any) -> None:
    hf = wrapped(beta_init=0.5)
    state = hf.state_dict()
    del state["model.trunk.residuals.1.gate.bias"], state["model.trunk.residuals.3.value.weight"]
    hf.save_pretrained(tmp_path, state_dict=state)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    residuals = again.model.trunk.residuals
    gate, value = residuals[1].gate.bias, residuals[3].value.weight
    assert gate.item() == pytest.approx(math.log(0.5 / 1.5))
    assert value.std().item() == pytest.approx(0.5 / math.sqrt(32), rel=0.2)
    assert torch.equal(residuals[0].gate.bias, hf.model.trunk.residuals[0].gate.bias)
