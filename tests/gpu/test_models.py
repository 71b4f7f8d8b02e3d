"""Models on the GPU against the same models on the CPU: trunks, drop-ins and training steps."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ddl import DeltaResidual, DeltaStream
from ddl.lab.config import RESIDUALS, GPTConfig, OptimConfig
from ddl.models import GPT, Cache
from ddl.models.sublayers import Rotary
from ddl.optim import make_optimizer
from tests.nn.test_stream import RESIDUALS as RESIDUAL_OPTIONS
from tests.support.gpu_device import DEVICE
from tests.support.helpers import assert_same_gradients, randomise_
from tests.support.read_cases import READS, name_of
from tests.support.tolerances import assert_close

CPU, F64, F32 = torch.device("cpu"), torch.float64, torch.float32
B, T, D = 2, 33, 28  # D: a multiple of the heads in the options
SMALL = GPTConfig(vocab_size=61, block_size=32, num_layers=2, num_heads=2, hidden_size=32)


def results(
    module: nn.Module, *inputs: Tensor, **options: Tensor
) -> tuple[Tensor, dict[str, Tensor]]:
    """Output and gradients of inputs and parameters, on the CPU."""
    module.zero_grad()
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    output = module(*leaves, **options)
    weights = torch.linspace(-1, 1, output.numel(), device=output.device, dtype=F64)
    (output.double() * weights.view(output.shape)).sum().backward()
    grads = {f"input {i}": leaf.grad for i, leaf in enumerate(leaves)}
    grads |= {name: p.grad for name, p in module.named_parameters()}
    # Copies: `Module.to` moves a parameter's gradient in place, for whoever else holds it, too.
    return output.detach().cpu(), {n: g.cpu().clone() for n, g in grads.items() if g is not None}


def random_module(make: Any) -> nn.Module:
    """A module on the CPU with random float64 parameters."""
    with CPU:
        module = make().double()
        randomise_(module)
    return module


@pytest.mark.parametrize("expand", ["repeat", "conv"])
@pytest.mark.parametrize("residual", RESIDUAL_OPTIONS, ids=name_of)
@pytest.mark.parametrize("read", READS, ids=name_of)
def test_a_stream_equals_the_cpus(
    read: dict[str, Any], residual: dict[str, Any], expand: str
) -> None:
    def make() -> DeltaStream:
        sublayers = [nn.Linear(D, D) for _ in range(4)]
        return DeltaStream(D, sublayers, **read, **residual, expand=expand)

    module = random_module(make)
    x = torch.randn(B, T, D, dtype=F64, device=CPU)
    expected, wanted = results(module, x)
    actual, found = results(module.to(DEVICE), x.to(DEVICE))
    assert_close("readout", actual, expected, F64, depth=4)
    assert_same_gradients(found, wanted, F64, depth=4)


@pytest.mark.parametrize("options", RESIDUAL_OPTIONS, ids=name_of)
@pytest.mark.parametrize("m", [1, 4])
def test_a_drop_in_equals_the_cpus(m: int, options: dict[str, Any]) -> None:
    module = random_module(lambda: DeltaResidual(D, m, **options))
    shapes = ((B, T, D) if m == 1 else (B, T, D, m), (B, T, D))
    state, out = (torch.randn(shape, dtype=F64, device=CPU) for shape in shapes)
    context, raw = (torch.randn(B, T, D, dtype=F64, device=CPU) for _ in range(2))
    expected, wanted = results(module, state, out, context=context, compressed=raw)
    given = {"context": context.to(DEVICE), "compressed": raw.to(DEVICE)}
    actual, found = results(module.to(DEVICE), state.to(DEVICE), out.to(DEVICE), **given)
    assert_close("state", actual, expected, F64, depth=2)
    assert_same_gradients(found, wanted, F64, depth=2)


def losses(model: GPT, idx: Tensor, steps: int, *, autocast: bool = False) -> list[float]:
    """Losses of AdamW steps on one batch."""
    optimizer = make_optimizer(model, OptimConfig(lr=1e-3))
    found = []
    for _ in range(steps):
        with torch.autocast(idx.device.type, torch.bfloat16, enabled=autocast):
            loss = model(idx, labels=idx).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


def make_gpt(residual: str) -> tuple[GPT, Tensor]:
    """A model with a random trunk, and a batch, both on the CPU."""
    with CPU:
        torch.manual_seed(0)
        model = GPT(GPTConfig(**{**vars(SMALL), "residual": residual}))
        randomise_(model.trunk, std=0.3)
        return model, torch.randint(SMALL.vocab_size, (4, SMALL.block_size))


def moved(model: GPT) -> GPT:
    """A copy on the GPU with the CPU's rotary tables: a cosine's last bit differs by device."""
    there = copy.deepcopy(model).to(DEVICE)
    for a, b in zip(there.modules(), model.modules(), strict=True):
        if isinstance(a, Rotary):
            a.cos, a.sin = b.cos.to(DEVICE), b.sin.to(DEVICE)
    return there


@pytest.mark.parametrize("residual", RESIDUALS)
def test_training_steps_in_float64_equal_the_cpus(residual: str) -> None:
    model, idx = make_gpt(residual)
    model = model.double()
    there = moved(model)
    expected, actual = losses(model, idx, 5), losses(there, idx.to(DEVICE), 5)
    assert actual == pytest.approx(expected, rel=1e-9)
    assert expected[0] - expected[-1] > 1e-4  # far more than what may differ
    for (name, a), b in zip(there.named_parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(
            a.cpu(), b, rtol=0, atol=1e-7, msg=lambda m, name=name: f"{name}: {m}"
        )


@pytest.mark.parametrize("mode", ["float32", "autocast", "bfloat16", "compiled"])
@pytest.mark.parametrize("residual", RESIDUALS)
def test_training_steps_follow_the_cpus(residual: str, mode: str) -> None:
    """Losses agree up to the precision of matrix products."""
    model, idx = make_gpt(residual)
    there = copy.deepcopy(model).to(DEVICE)
    expected = losses(model, idx, 5)
    if mode == "bfloat16":
        there = there.bfloat16()
    if mode == "compiled":
        there = torch.compile(there, fullgraph=True)
    actual = losses(there, idx.to(DEVICE), 5, autocast=mode == "autocast")
    allowed = 1e-4 if mode in ("float32", "compiled") else 0.05
    assert actual == pytest.approx(expected, abs=allowed)


@pytest.mark.parametrize("residual", RESIDUALS)
def test_the_same_text_is_generated(residual: str) -> None:
    model, idx = make_gpt(residual)
    model = model.double()
    expected = model.generate(idx[:, :3], 10, temperature=0)
    actual = moved(model).generate(idx[:, :3].to(DEVICE), 10, temperature=0)
    assert torch.equal(actual.cpu(), expected)


@pytest.mark.parametrize("residual", RESIDUALS)
def test_a_step_from_a_static_cache_is_captured_in_a_graph(residual: str) -> None:
    """Replays give the logits of steps from a growing cache."""
    torch.manual_seed(0)
    model = GPT(replace(SMALL, residual=residual)).to(DEVICE).eval()
    randomise_(model.trunk, std=0.3)
    idx = torch.randint(61, (2, 16), device=DEVICE)
    with torch.no_grad():
        growing, static = Cache(model.config), Cache(model.config, static=True)
        for cache in (growing, static):
            model(idx[:, :5], cache=cache)
            model(idx[:, 5:6], cache=cache)  # compiles what a step needs
        new, graph = idx[:, 6:7].clone(), torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            logits = model(new, cache=static).logits
        for at in range(6, 16):
            new.copy_(idx[:, at : at + 1])
            graph.replay()
            expected = model(idx[:, at : at + 1], cache=growing).logits
            torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)
    assert static.length == growing.length == 16
