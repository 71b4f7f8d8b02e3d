"""nanoGPT's converted GPT computes the equations, learns, and keeps the original."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ddl import DeltaStream, Read
from ddl.nanogpt import DeltaBlock, convert
from tests.support.helpers import assert_same_gradients, gradients, normal, randomise_
from tests.support.nanogpt_cases import (
    F64,
    OTHERS,
    VARIANTS,
    T,
    added,
    by_equations,
    make,
    make_delta,
    same,
    tokens,
    variants,
)
from tests.support.nanogpt_standin import GPT, LayerNorm
from tests.support.tolerances import assert_close

# --- it computes the equations -------------------------------------------------------------------


def by_modules(model: GPT, idx: Tensor) -> Tensor:
    """The same with reads and residuals called as modules, for any options."""
    t, H = model.transformer, list(model.transformer.h)
    X = H[0].expand(t.drop(t.wte(idx) + t.wpe(torch.arange(idx.shape[1]))))
    for block in H:
        for norm, sublayer, read, residual in (
            (block.ln_1, block.attn, block.read_attn, block.res_attn),
            (block.ln_2, block.mlp, block.read_mlp, block.res_mlp),
        ):
            x = read(X)
            X = residual(X, sublayer(norm(x)), context=norm(x), compressed=x)
    return model.lm_head(t.ln_f(H[-1].readout(X)))


def compare(model: GPT, loop: Any) -> None:
    """Compare logits, loss and the gradient of every parameter, with the same dropout masks."""
    idx, targets = tokens()
    torch.manual_seed(1)
    logits, loss = model(idx, targets)
    torch.manual_seed(1)
    expected = loop(model, idx)
    assert_close("logits", logits, expected, F64, depth=8)
    assert_close(
        "loss", loss, nn.functional.cross_entropy(expected.flatten(0, 1), targets.flatten()), F64
    )
    named, looped = (gradients(y, {}, model) for y in (logits, expected))
    assert_same_gradients(named, looped, F64, depth=8)
    assert all(gradient.isfinite().all() for gradient in named.values())


@pytest.mark.parametrize("bias", [True, False])
@variants
def test_converted_is_the_equations(options: dict[str, Any], bias: bool) -> None:
    compare(make_delta(options, bias=bias), by_equations)


@pytest.mark.parametrize("flash", [True, False])
@variants
def test_dropout_in_training(options: dict[str, Any], flash: bool) -> None:
    model = make_delta(options, dropout=0.3, flash=flash)
    compare(model, by_equations)
    idx, targets = tokens()
    assert not torch.equal(model(idx, targets)[0], model(idx, targets)[0])
    assert torch.equal(model.eval()(idx, targets)[0], model(idx, targets)[0])


@pytest.mark.parametrize("options", OTHERS.values(), ids=OTHERS)
def test_other_options(options: dict[str, Any]) -> None:
    compare(make_delta(options), by_modules)


@variants
def test_converted_is_causal(options: dict[str, Any]) -> None:
    model = make_delta(options)
    idx, targets = tokens()
    before = model(idx, targets)[0]
    for t in range(T):
        changed = idx.clone()
        changed[:, t] = (changed[:, t] + 1) % 64
        touched = (model(changed, targets)[0] != before).any(-1)[0]
        assert touched.tolist() == [u >= t for u in range(T)]


def test_one_block_opens_and_closes() -> None:
    compare(make_delta(VARIANTS["tc"], n_layer=1), by_equations)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@variants
def test_autocast(options: dict[str, Any], dtype: torch.dtype) -> None:
    """As in train.py: float32 parameters and stream, matrix products in half precision."""
    model, exact = (make_delta(options, t) for t in (torch.float32, F64))
    idx, targets = tokens()
    normalised = []  # reads reach the LayerNorms unrounded
    for module in model.modules():
        if isinstance(module, LayerNorm):
            module.register_forward_pre_hook(lambda _, x: normalised.append(x[0].dtype))
    with torch.autocast("cpu", dtype):
        logits, loss = model(idx, targets)
    assert normalised == [torch.float32] * 5
    loss.backward()
    error = (logits.double() - exact(idx, targets)[0]).square().mean().sqrt()
    assert error < 8 * torch.finfo(dtype).eps
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


def test_a_read_without_norm_is_the_compressed_state() -> None:
    """The blocks' reads have no γ: h = x, in a loop and in the operator."""
    read = Read(8, 3, compress="channel", norm_eps=None).double()
    randomise_(read)
    assert [name for name, _ in read.named_parameters()] == ["compress_weight"]
    state = normal(2, 5, 8, 3)
    x = torch.einsum("...dm,dm->...d", state, read.compress_weight)
    assert_close("x", read(state), x, F64)
    for part in read(state, return_compressed=True):
        assert_close("x", part, x, F64)
    assert "norm_eps=None" in repr(read)


def test_a_stream_without_norm() -> None:
    stream = DeltaStream(8, [nn.Linear(8, 8) for _ in range(3)], value_channels=2, norm_eps=None)
    randomise_(stream.double())
    x = normal(2, 5, 8)
    X = stream.expand(x)
    for read, sublayer, residual in zip(
        stream.reads, stream.sublayers, stream.residuals, strict=True
    ):
        X = residual(X, sublayer(read(X)), context=read(X))
    assert_close("readout", stream(x), stream.readout(X), F64, depth=3)


# --- it learns -----------------------------------------------------------------------------------


def train(model: GPT, steps: int = 150) -> float:
    """Train on random sequences of period 3, predictable from the context; return the last loss."""
    g = torch.Generator().manual_seed(0)
    optimizer = model.configure_optimizers(0.1, 1e-2, (0.9, 0.95), "cpu")
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = 1e-2 * min(1, (step + 1) / 20, (steps - step) / 50)
        idx = torch.randint(8, (16, 3), generator=g).repeat(1, 6)[:, :17]
        targets = idx[:, 1:].clone()
        targets[:, :2] = -1  # not predictable
        _, loss = model(idx[:, :-1], targets)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return loss.item()


SMALL = {"vocab_size": 8, "n_embd": 32, "n_head": 4}


@pytest.mark.table(0)
@pytest.mark.parametrize("name", ["m1", "cc", "tc"])
def test_training_learns_what_needs_the_blocks(name: str) -> None:
    assert train(convert(make(**SMALL, dropout=0.0), **VARIANTS[name])) < 0.1


def test_frozen_blocks_do_not_reach_that() -> None:
    """Embeddings, head and ln_f alone stay far above the threshold, so the test above can fail."""
    model = make(**SMALL)
    model.transformer.h.requires_grad_(False)
    assert train(model) > 1.5


# --- the original is kept ------------------------------------------------------------------------


@variants
def test_disabled_is_the_original(options: dict[str, Any]) -> None:
    original = make(dropout=0.2)
    model = convert(copy.deepcopy(original), **options, disable=True)
    assert type(model) is GPT
    assert model.state_dict().keys() == original.state_dict().keys()
    assert same(model, original)
    assert not torch.equal(convert(model, **options)(*tokens())[0], original(*tokens())[0])


@variants
def test_converting_leaves_no_trace_in_the_random_state(options: dict[str, Any]) -> None:
    """An A/B comparison needs the same batches and dropout masks."""
    model = make()
    before = torch.get_rng_state()
    convert(model, **options)
    assert torch.equal(torch.get_rng_state(), before)


@variants
def test_what_the_model_had_keeps_its_name_and_its_numbers(options: dict[str, Any]) -> None:
    original = make(flash=False)
    model = convert(copy.deepcopy(original), **options)
    converted = model.state_dict()
    for name, tensor in original.state_dict().items():
        assert torch.equal(converted[name], tensor), name
    missing, unexpected = model.load_state_dict(original.state_dict(), strict=False)
    assert (set(missing), unexpected) == (set(added(model)), [])
    assert model.lm_head.weight is model.transformer.wte.weight
    assert isinstance(model, GPT)
    assert all(isinstance(block, DeltaBlock) for block in model.transformer.h)


def test_converting_keeps_the_mode() -> None:
    for training in (True, False):
        model = convert(make().train(training), **VARIANTS["tc"])
        assert {module.training for module in model.modules()} == {training}


def test_the_names_of_new_parameters() -> None:
    """Checkpoints contain these names."""
    model = convert(make(), value_channels=4, compress="token", expand="conv")
    shapes = {name: tuple(p.shape) for name, p in added(model).items()}
    d, m, K = 16, 4, 4
    expected = {"transformer.h.0.expand.weight": (d, m, K)}
    expected["transformer.h.1.readout.compress_weight"] = (d, m, K)
    for block in ("transformer.h.0", "transformer.h.1"):
        expected[f"{block}.read_attn.compress_weight"] = (d, m, K)
        for residual in (f"{block}.res_attn", f"{block}.res_mlp"):
            expected |= {f"{residual}.gate.weight": (1, d), f"{residual}.gate.bias": (1,)}
            expected |= {f"{residual}.value.weight": (m, d), f"{residual}.value.bias": (m,)}
    assert shapes == expected


@pytest.mark.parametrize("options", [VARIANTS["m1"], VARIANTS["cc-noec"]], ids=str)
def test_large_eps_k_and_value_start_as_the_original(options: dict[str, Any]) -> None:
    """This limit makes GPT-2's weights useful; the error falls with E, the default is far off."""
    original = make(F64)
    randomise_(original, std=0.7)
    expected = original(*tokens())[0]

    def error(**limit: float) -> float:
        model = convert(copy.deepcopy(original), **options, **limit)
        return ((model(*tokens())[0] - expected).norm() / expected.norm()).item()

    assert error() > 0.1
    assert error(eps_k=1e3, value_init=1e3) < 3e-3
    assert error(eps_k=1e5, value_init=1e5) < 3e-5
