"""A converted GPT in nanoGPT's scripts: optimizer, generation, checkpoints, compilation, DDP."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ddl import DeltaResidual, Expand, Read
from ddl.nanogpt import convert, converted
from tests.support.helpers import assert_same_gradients, gradients
from tests.support.nanogpt_cases import (
    F64,
    OTHERS,
    VARIANTS,
    B,
    added,
    groups,
    make,
    make_delta,
    same,
    step,
    tokens,
    variants,
)
from tests.support.nanogpt_standin import GPT
from tests.support.tolerances import assert_close


@pytest.mark.parametrize("options", (VARIANTS | OTHERS).values(), ids=VARIANTS | OTHERS)
def test_groups_of_the_optimizer(options: dict[str, Any]) -> None:
    original, model = make(), convert(make(), **options)
    optimizer = model.configure_optimizers(0.3, 1e-3, (0.9, 0.95), device_type="cpu")
    decayed, kept, new = groups(model, optimizer)
    of_original = groups(original, original.configure_optimizers(0.3, 1e-3, (0.9, 0.95), "cpu"))
    assert [decayed, kept] == of_original
    assert new == added(model).keys()
    assert len(decayed | kept | new) == len(list(model.parameters()))
    assert "lm_head.weight" not in decayed  # the tied head, once
    assert "transformer.wte.weight" in decayed
    settings = [(g["weight_decay"], g["lr"], g["betas"]) for g in optimizer.param_groups]
    assert settings == [(decay, 1e-3, (0.9, 0.95)) for decay in (0.3, 0.0, 0.0)]
    assert all(p.requires_grad for p in model.parameters())


def test_frozen_parameters_are_left_out_and_stay_frozen() -> None:
    model = convert(make(), value_channels=2)
    frozen = model.transformer.h[0].res_attn.gate.weight.requires_grad_(False)
    optimizer = model.configure_optimizers(0.1, 1e-3, (0.9, 0.95), "cpu")
    listed = {p for group in optimizer.param_groups for p in group["params"]}
    assert listed == set(model.parameters()) - {frozen}
    assert not frozen.requires_grad


def test_a_method_that_takes_frozen_parameters_as_well() -> None:
    class Other(GPT):
        def configure_optimizers(self, *_: Any) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), weight_decay=0.3)

    model = convert(Other(make().config), value_channels=2)
    optimizer: Any = model.configure_optimizers()
    theirs, new = groups(model, optimizer)
    assert new == added(model).keys()
    assert theirs == dict(model.named_parameters()).keys() - new
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.3, 0.0]


def test_an_optimizer_that_fails_leaves_nothing_frozen() -> None:
    model = convert(make())
    with pytest.raises(ValueError, match="learning rate"):
        model.configure_optimizers(0.1, -1.0, (0.9, 0.95), "cpu")
    assert all(p.requires_grad for p in model.parameters())


def test_weight_decay_moves_nothing_that_is_new() -> None:
    """A step with zero gradients applies weight decay only."""
    model = convert(make(), **VARIANTS["tc"])
    optimizer = model.configure_optimizers(0.5, 1e-1, (0.9, 0.95), "cpu")
    before = {name: p.clone() for name, p in model.named_parameters()}
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    moved = {name for name, p in model.named_parameters() if not torch.equal(p, before[name])}
    assert moved == {name for name in before.keys() - added(model).keys() if before[name].ndim > 1}


@variants
def test_new_parameters_start_as_in_the_stream(options: dict[str, Any]) -> None:
    model = convert(make(), **options)
    for module in model.modules():
        if isinstance(module, DeltaResidual):
            assert not module.gate.weight.any()
            assert not module.gate.bias.any()  # β = 1
            assert (module.value.bias == 1).all()
            assert 0.3 < module.value.weight.std() / 0.5 * 16**0.5 < 2
        if isinstance(module, Read | Expand):
            x = torch.randn(2, 5, 16)
            state = x[..., None].expand(2, 5, 16, module.value_channels).squeeze(-1)
            pair = (module(x), state) if isinstance(module, Expand) else (module(state), x)
            torch.testing.assert_close(*pair)


@variants
def test_generate(options: dict[str, Any]) -> None:
    """The last logits equal the training forward's, and generation exceeds the block size."""
    model = make_delta(options, torch.float32).eval()
    idx, targets = tokens()
    assert_close("last", model(idx)[0], model(idx, targets)[0][:, -1:], torch.float32)
    longer = model.generate(idx[:, :1], 20, temperature=0.8, top_k=5)
    assert longer.shape == (B, 21)
    assert torch.equal(longer[:, :1], idx[:, :1])
    greedy = model.generate(idx[:, :3], 4, top_k=1)
    for t in range(3, 7):
        logits = model(greedy[:, :t], greedy[:, :t])[0][:, -1]
        assert torch.equal(greedy[:, t], logits.argmax(-1))


@pytest.mark.parametrize("flash", [True, False])
@variants
def test_crop_block_size(options: dict[str, Any], flash: bool) -> None:
    model = make_delta(options, torch.float32, flash=flash).eval()
    idx, _ = tokens(time=8)
    expected = model(idx)[0]
    model.crop_block_size(8)
    assert torch.equal(model(idx)[0], expected)
    assert model.config.block_size == 8
    assert model.transformer.wpe.weight.shape == (8, 16)
    with pytest.raises(AssertionError):
        model(tokens(time=9)[0])
    optimizer = model.configure_optimizers(0.1, 1e-3, (0.9, 0.95), "cpu")
    assert "transformer.wpe.weight" in groups(model, optimizer)[0]
    before = make_delta(options, torch.float32, flash=flash)
    cropped = make(flash=flash)
    cropped.crop_block_size(8)  # cropping first differs only by the noise of randomise_
    assert convert(cropped, **options).state_dict().keys() == before.state_dict().keys()


def test_estimate_mfu_counts_the_new_parameters() -> None:
    original, model = make(), convert(make(), value_channels=4)
    new = sum(p.numel() for p in added(model).values())
    assert model.get_num_params() == original.get_num_params() + new
    mfu, of_original = (m.estimate_mfu(12, 0.5) for m in (model, original))
    assert mfu - of_original == pytest.approx(6 * new * 16 * 12 / 0.5 / 312e12)


@pytest.mark.parametrize("prefix", ["", "_orig_mod."])
@variants
def test_resuming_goes_on_as_if_nothing_happened(options: dict[str, Any], prefix: str) -> None:
    """nanoGPT's checkpoint: weights, with or without a compiled model's prefix, and optimizer."""
    model = convert(make(dropout=0.2), **options)
    optimizer = model.configure_optimizers(0.1, 1e-3, (0.9, 0.95), "cpu")
    for seed in range(3):
        step(model, optimizer, seed)
    state = {prefix + name: tensor for name, tensor in model.state_dict().items()}
    file = io.BytesIO()
    torch.save({"model": state, "optimizer": optimizer.state_dict()}, file)
    file.seek(0)
    checkpoint = torch.load(file, weights_only=True)

    resumed = convert(make(dropout=0.2), **options)
    state = {name.removeprefix("_orig_mod."): x for name, x in checkpoint["model"].items()}
    resumed.load_state_dict(state)
    other = resumed.configure_optimizers(0.1, 1e-3, (0.9, 0.95), "cpu")
    other.load_state_dict(checkpoint["optimizer"])
    for seed in range(3, 6):
        assert step(resumed, other, seed) == step(model, optimizer, seed)
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, resumed.get_parameter(name)), name


def refused(model: nn.Module, state: Any) -> list[str]:
    """The sentences with which a state dict is refused."""
    with pytest.raises(RuntimeError) as raised:
        model.load_state_dict(state)
    return [sentence.strip() for sentence in str(raised.value).splitlines()]


def test_a_checkpoint_of_other_options_does_not_load() -> None:
    with pytest.raises(RuntimeError, match="Error"):
        make().load_state_dict(convert(make()).state_dict())
    sentences = {
        "erase": ("none", "`erase` must be 'none', as when this state dict was saved, got 'tied'"),
        "causal": (True, "`causal` must be True, as when this state dict was saved, got False"),
        "value_channels": (
            3, "`value_channels` must be 3, as when this state dict was saved, got 2"
        ),
    }  # fmt: skip
    factored = {"value_channels": 2, "compress": "channel", "compress_parameterization": "factored"}
    for name, (other, sentence) in sentences.items():
        state = convert(make(), **{**factored, name: other}).state_dict()
        assert sentence in refused(convert(make(), **factored), state)
        assert sentence in refused(converted(GPT, **factored)(make().config), state)


def test_a_checkpoint_of_earlier_names_loads() -> None:
    """`compress_parameterization` was `parameterization` in the options that are saved with it."""
    factored = {"value_channels": 2, "compress": "channel", "compress_parameterization": "factored"}
    state = convert(make(), **factored).state_dict()
    saved = state._metadata[""]["delta_args"]
    saved["parameterization"] = saved.pop("compress_parameterization")
    convert(make(), **factored).load_state_dict(state)
    saved["parameterization"] = "direct"
    with pytest.raises(RuntimeError, match="`compress_parameterization` must be 'direct', as when"):
        convert(make(), **factored).load_state_dict(state)


@variants
def test_copies(options: dict[str, Any]) -> None:
    """deepcopy and pickle the whole model, whose class is created at run time."""
    model = make_delta(options, torch.float32)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert type(twin) is type(model)
        assert same(twin, model)
        assert groups(twin, twin.configure_optimizers(0.1, 1e-3, (0.9, 0.95), "cpu"))
        nn.init.zeros_(twin.transformer.h[0].res_attn.value.bias)
        assert model.transformer.h[0].res_attn.value.bias.any()


@pytest.mark.table(0)
@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("name", ["tc", "m1", "cc-noec", "wide"])
def test_compiled_is_eager(name: str) -> None:
    """Full graphs give the same logits and gradients."""
    model = make_delta((VARIANTS | OTHERS)[name])
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    results = [m(*tokens())[0] for m in (compiled, model)]
    assert_close("logits", *results, F64, depth=8)
    named, expected = (gradients(logits, {}, model) for logits in results)
    assert_same_gradients(named, expected, F64, depth=8)


@pytest.mark.exhaustive
@pytest.mark.usefixtures("fresh_compiler")
def test_compiled_inference_of_any_length() -> None:
    model = make_delta(VARIANTS["tc"]).eval()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    with torch.no_grad():
        for time in (9, 5, 2):
            idx, _ = tokens(time=time)
            assert_close("logits", compiled(idx)[0], model(idx)[0], F64, depth=8)


@pytest.mark.usefixtures("fresh_compiler")
def test_compiled_by_inductor() -> None:
    model = make_delta(VARIANTS["cc-noec"], torch.float32).eval()
    idx, _ = tokens()
    with torch.no_grad():
        assert_close(
            "logits",
            torch.compile(model, fullgraph=True)(idx)[0],
            model(idx)[0],
            torch.float32,
            depth=8,
        )


@pytest.mark.skipif(not torch.distributed.is_available(), reason="torch without distributed")
def test_ddp_finds_every_parameter_used(tmp_path: Any) -> None:
    """DDP raises in the second step if the first left a parameter without gradient."""
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1
    )
    try:
        model = convert(make(), **VARIANTS["tc"])
        optimizer = model.configure_optimizers(0.1, 1e-3, (0.9, 0.95), "cpu")
        wrapped = DistributedDataParallel(model)
        first, second = (step(wrapped, optimizer, 0) for _ in range(2))
        assert second < first
    finally:
        torch.distributed.destroy_process_group()


def test_moving_after_converting() -> None:
    model = convert(make(), **VARIANTS["tc"]).to(torch.bfloat16)
    logits, _ = model(*tokens())
    assert logits.dtype == torch.bfloat16
    on_meta = convert(make().to("meta"), **VARIANTS["tc"])
    assert {p.device.type for p in on_meta.parameters()} == {"meta"}
    assert on_meta(tokens()[0].to("meta"))[0].shape == (B, 1, 64)
