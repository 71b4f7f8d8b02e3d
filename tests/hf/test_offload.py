"""Models that accelerate keeps partly off the device: right numbers, or a sentence."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import cpu_offload, disk_offload, dispatch_model

from ddl.hf import DDLForCausalLM, from_gpt
from ddl.nn.checks import require_own_forward
from ddl.nn.read import Read
from tests.support.hf_cases import VARIANTS, model, tokens
from tests.support.nanogpt_cases import make_delta
from tests.support.nanogpt_cases import tokens as tokens_of_nanogpt
from tests.support.sampling import few

IDX = tokens(2, 12)
PARTLY = {"model.wte": "cpu", "lm_head": "cpu", "model.trunk": "disk"}
HEAD_AWAY = {"model.wte": "disk", "lm_head": "disk", "model.trunk": "cpu"}
WAYS: dict[str, Callable[..., Any]] = {
    "cpu": lambda hf, out, **more: cpu_offload(hf, execution_device="cpu", **more),
    "disk": lambda hf, out, **more: disk_offload(hf, out, execution_device="cpu", **more),
    "device map": lambda hf, out, **more: dispatch_model(
        hf, PARTLY, main_device="cpu", offload_dir=out, force_hooks=True, **more
    ),
}


def sentence(name: str, kind: str) -> str:
    return (
        f"`{name}` must keep its parameters on the device, because they are used without calling "
        f"it, got a {kind} that accelerate offloads: name the class around it, such as GPT, "
        "DeltaBlock or the stream's, in `preload_module_classes` of `dispatch_model`, "
        "`cpu_offload` or `disk_offload`"
    )


def same(hf: DDLForCausalLM, options: dict[str, Any]) -> None:
    whole = from_gpt(model(**options))
    generation = {"max_new_tokens": 3, "do_sample": False, "pad_token_id": 0}
    assert torch.equal(hf(IDX).logits, whole(IDX).logits)
    assert torch.equal(hf.generate(IDX, **generation), whole.generate(IDX, **generation))


# The part that is read without a call, and its class; None for models that call all their modules.
READ: dict[str, tuple[str, str] | None] = {
    "additive": None,
    "additive-conv": ("reads[0]", "Read"),
    "hc": None,
    "mhc": None,
    "independent-hc": None,
    "gated": ("read", "GatedRead"),
    "attention-residual": ("queries", "ParameterList"),
    "expanded": ("reads[0]", "Read"),
    "ddl-tc": ("reads[0]", "Read"),
    "mixers": ("reads[0]", "Read"),
    "hybrid": ("taps", "ParameterDict"),
}


@pytest.mark.parametrize("way", few(WAYS, "cpu"))
@pytest.mark.parametrize("name", READ)
@torch.no_grad()
def test_offloaded(way: str, name: str, tmp_path: Path) -> None:
    options = VARIANTS[name]
    hf, classes = from_gpt(model(**options)), DDLForCausalLM._no_split_modules
    same(WAYS[way](hf, tmp_path / "preloaded", preload_module_classes=classes), options)
    hf = WAYS[way](from_gpt(model(**options)), tmp_path / "called")
    read = READ[name]
    if read is None:
        same(hf, options)
        return
    with pytest.raises(TypeError, match=f"^{re.escape(sentence(*read))}$"):
        hf(IDX)


@torch.no_grad()
def test_a_trunk_that_stays_needs_nothing(tmp_path: Path) -> None:
    """accelerate's hooks are on its modules, but move nothing."""
    hf = from_gpt(model(residual="ddl-tc"))
    options = {"main_device": "cpu", "offload_dir": tmp_path, "force_hooks": True}
    hf = dispatch_model(hf, HEAD_AWAY, **options)
    assert "forward" in hf.model.trunk.reads[0].__dict__
    same(hf, {"residual": "ddl-tc"})
    hf.model.trunk.reads[0]._old_forward = lambda state: state
    with pytest.raises(TypeError, match="got Read with another forward"):
        require_own_forward("read", hf.model.trunk.reads[0], Read)


@torch.no_grad()
def test_from_pretrained_with_a_device_map(tmp_path: Path) -> None:
    from_gpt(model(residual="ddl-tc")).save_pretrained(tmp_path / "model")
    more = {"device_map": PARTLY, "offload_folder": tmp_path / "away"}
    hf = DDLForCausalLM.from_pretrained(tmp_path / "model", **more)
    with pytest.raises(TypeError, match=f"^{re.escape(sentence('reads[0]', 'Read'))}$"):
        hf(IDX)


@torch.no_grad()
def test_models_of_other_interfaces() -> None:
    idx, _ = tokens_of_nanogpt()
    gpt = partial(model, residual="additive")
    blocks = partial(make_delta, {"value_channels": 4}, torch.float32)
    for make, given, name, kind, owner in (
        (gpt, IDX, "wte", "Embedding", "GPT"),
        (blocks, idx, "read_attn", "Read", "DeltaBlock"),
    ):
        expected = make()(given)[0]
        offloaded = cpu_offload(make(), execution_device="cpu", preload_module_classes=[owner])
        assert torch.equal(offloaded(given)[0], expected)
        with pytest.raises(TypeError, match=f"^{re.escape(sentence(name, kind))}$"):
            cpu_offload(make(), execution_device="cpu")(given)
