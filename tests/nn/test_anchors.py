"""`anchor_every` changes what is stored, and no bit of any gradient."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import ddl.nanogpt
from ddl.models import GPT, GPTConfig
from ddl.nn.stream import DeltaStream
from ddl.options import spread_anchors
from tests.support import nanogpt_standin
from tests.support.forks import forked
from tests.support.kept import fake_gpu, kept_states, kept_states_by_device, replace_tensors

VARIANTS: dict[str, dict[str, Any]] = {
    "ddl": {"residual": "ddl"},
    "cc": {"residual": "ddl-cc"},
    "cc-noec": {"residual": "ddl-cc-noec"},
    "cc-m3": {"residual": "ddl-cc", "value_channels": 3},
    "cc-m16": {"residual": "ddl-cc", "value_channels": 16},
    "tc": {"residual": "ddl-tc"},
    "tc-noec": {"residual": "ddl-tc-noec"},
    "factored": {"residual": "ddl-cc", "compress_parameterization": "factored"},
    "v-map": {"residual": "ddl-cc", "mapping": "v"},
    "v-map-tc": {"residual": "ddl-tc", "mapping": "v", "direction": "mean"},
    "attention": {"residual": "ddl-cc", "mapping": "v", "direction": "attention"},
    "pooled": {"residual": "ddl-cc", "gate_from": "pooled"},
    "convolved": {"residual": "ddl-tc", "gate_from": "convolved"},
    "mlp-gate": {"residual": "ddl-cc", "gate": "mlp"},
    "sigmoid": {"residual": "ddl-cc", "value": "sigmoid"},
    "constant": {"residual": "ddl-cc", "value": "constant"},
    "compressed": {"residual": "ddl-tc", "value_from": "compressed"},
    "two-rewrites": {"residual": "ddl-tc", "rewrites": 2},
    "three-rewrites": {"residual": "ddl-cc", "rewrites": 3, "direction_rank": 4},
}
EXHAUSTIVE = pytest.mark.exhaustive
IDX = torch.randint(31, (2, 12), generator=torch.Generator().manual_seed(0))
Loss = Callable[[nn.Module], Tensor]


def gpt(anchor_every: int | None, dtype: torch.dtype = torch.float32, **options: Any) -> GPT:
    sizes = {"vocab_size": 31, "block_size": 16, "num_layers": 3, "num_heads": 2}
    return moved(
        lambda: GPT(GPTConfig(**sizes, hidden_size=32, anchor_every=anchor_every, **options))
    ).to(dtype)


def moved(make: Callable[[], Any]) -> Any:
    """Return a model far from its initialisation, so that every gate and value takes part."""
    torch.manual_seed(0)
    model = make()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def loss_of(model: nn.Module) -> Tensor:
    return model(IDX, labels=IDX).loss


def gradients(model: nn.Module, loss: Loss = loss_of) -> dict[str, Tensor | None]:
    model.zero_grad(set_to_none=True)
    loss(model).backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def assert_same_bits(actual: dict[str, Tensor | None], expected: dict[str, Tensor | None]) -> None:
    assert actual.keys() == expected.keys()
    for name, gradient in expected.items():
        found = actual[name]
        same = found is gradient is None or torch.equal(found, gradient)  # type: ignore[arg-type]
        assert same, name


@pytest.mark.parametrize("options", VARIANTS.values(), ids=VARIANTS)
@pytest.mark.parametrize("anchor_every", [2, 3, 32])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.table
def test_gradients_have_the_same_bits(options, anchor_every, dtype):
    expected = gradients(gpt(1, dtype, **options))
    assert_same_bits(gradients(gpt(anchor_every, dtype, **options)), expected)


@pytest.mark.table(0)
@pytest.mark.parametrize(
    "variant",
    ["cc", "tc", *(pytest.param(name, marks=EXHAUSTIVE) for name in ("pooled", "ddl", "v-map"))],
)
@pytest.mark.parametrize("around", ["plain", "autocast"])
def test_compiled_gradients_have_the_same_bits(variant, around):
    compiled = []
    for anchor_every in (1, 4):
        torch._dynamo.reset()
        model = gpt(anchor_every, **VARIANTS[variant])
        autocast = torch.autocast("cpu", dtype=torch.bfloat16)
        with autocast if around == "autocast" else nullcontext():
            found = gradients(torch.compile(model, backend="aot_eager", fullgraph=True))
        compiled.append(found)
    assert_same_bits(compiled[1], compiled[0])


@pytest.mark.parametrize(
    "variant", [name if name == "cc" else pytest.param(name, marks=EXHAUSTIVE) for name in VARIANTS]
)
def test_compiled_autograd_of_compiled_sublayers(variant):
    """It adds what our backward returns for each use of a state, and an anchor has one more use."""
    model = gpt(3, torch.float64, **VARIANTS[variant])
    expected = gradients(model)
    for sublayer in model.trunk.sublayers:
        sublayer.compile(backend="eager")
    with torch._dynamo.compiled_autograd._enable(lambda graph: graph):
        found = gradients(model)
    torch._dynamo.reset()
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("variant", ["cc", "tc"])
def test_a_checkpointed_trunk_has_the_same_bits(variant, reentrant):
    found = []
    for anchor_every in (1, 4):
        model = gpt(anchor_every, **VARIANTS[variant])
        forward = model.trunk.forward
        model.trunk.forward = lambda x, *args, forward=forward, **kwargs: checkpoint(
            partial(forward, **kwargs), x, *args, use_reentrant=reentrant
        )
        found.append(gradients(model))
    assert_same_bits(found[1], found[0])


# --- nanoGPT --------------------------------------------------------------------------------------


def nanogpt(anchor_every: int | None, *, flash: bool = True, **options: Any) -> nn.Module:
    config = nanogpt_standin.GPTConfig(
        block_size=16, vocab_size=31, n_layer=4, n_head=2, n_embd=16, dropout=0.0, flash=flash
    )
    return moved(
        lambda: ddl.nanogpt.convert(
            nanogpt_standin.GPT(config), anchor_every=anchor_every, **options
        )
    )


def nanogpt_loss(model: nn.Module) -> Tensor:
    return model(IDX, IDX)[1]


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"value_channels": 4, "compress": "channel", "expand": "conv"},
        {"value_channels": 2, "compress": "token"},
        {"value_channels": 2, "mapping": "v"},
    ],
    ids=str,
)
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_a_converted_model_has_the_same_bits(options, compiled):
    found = []
    for anchor_every in (1, 3):
        torch._dynamo.reset()
        model = nanogpt(anchor_every, **options)
        run = torch.compile(model, backend="aot_eager") if compiled else model
        found.append(gradients(run, nanogpt_loss))
    assert_same_bits(found[1], found[0])


def test_a_block_may_be_checkpointed():
    """It runs twice with one chain, which must not have grown in between."""
    found = []
    for anchor_every in (1, 3):
        model = nanogpt(anchor_every, value_channels=4)
        for block in list(model.transformer.h)[1:-1]:  # type: ignore[union-attr]
            forward = block.forward
            block.forward = lambda x, forward=forward: checkpoint(forward, x, use_reentrant=False)
        found.append(gradients(model, nanogpt_loss))
    assert_same_bits(found[1], found[0])


# --- what is stored -------------------------------------------------------------------------------


@pytest.mark.parametrize("variant", ["cc", "tc", "v-map"])
def test_fewer_states_are_stored(variant):
    """Six sublayers: six states, or one for each anchor."""
    stored = []
    for anchor_every in (1, 2, 32, None):
        model = gpt(anchor_every, **VARIANTS[variant])
        stored.append(kept_states(partial(loss_of, model), IDX.numel() * 32 * 4))
    assert stored == [6, 3, 1, 1]


# --- the default ----------------------------------------------------------------------------------


@pytest.mark.parametrize("device_type", ["cpu", "meta", "mps"])
def test_the_default_spreads_the_stored_states_evenly(device_type):
    expected = {1: 8, 8: 8, 12: 12, 15: 15, 16: 8, 20: 10, 24: 8, 48: 8, 50: 9}
    for count, anchor_every in expected.items():
        assert spread_anchors(count, 2, device_type=device_type) == anchor_every
        assert spread_anchors(count, 4) == anchor_every


def test_the_default_on_a_gpu():
    expected = {1: 4, 4: 4, 6: 6, 7: 7, 8: 4, 10: 5, 12: 4, 24: 4, 48: 4, 50: 5}
    for count, anchor_every in expected.items():
        assert spread_anchors(count, 4, device_type="cuda") == anchor_every


@pytest.mark.parametrize("device_type", ["cpu", "cuda"])
def test_the_default_stores_every_state_with_one_channel(device_type):
    assert spread_anchors(24, 1, device_type=device_type) == 1


def test_a_stream_keeps_the_option_as_given():
    for anchor_every in (None, 1, 5):
        stream = make_stream(anchor_every=anchor_every)
        assert stream.anchor_every == anchor_every


def make_stream(**options: Any) -> DeltaStream:
    """Eight sublayers: one stored state on the CPU, two on a GPU."""
    return DeltaStream(8, [nn.Linear(8, 8) for _ in range(8)], **{"value_channels": 3, **options})


def embeddings(device: str) -> Tensor:
    return torch.zeros(2, 5, 8, device=device)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, (1, 2, 1)),
        ({"compress": "token"}, (1, 2, 1)),
        ({"anchor_every": 3}, (3, 3, 3)),
        ({"anchor_every": 1}, (8, 8, 8)),
    ],
    ids=str,
)
def test_the_states_of_a_stream_on_a_cpu_on_a_gpu_and_back(options, expected):
    stream = make_stream(**options)
    run = lambda device: stream(embeddings(device))  # noqa: E731
    assert kept_states_by_device(stream, run, 2 * 5 * 8 * 3) == expected


def test_the_states_of_a_converted_model_on_a_cpu_on_a_gpu_and_back():
    model = nanogpt(None, flash=False, value_channels=5)  # no other tensor is as large

    def run(device: str) -> Tensor:
        idx = torch.zeros(IDX.shape, dtype=torch.int64, device=device)
        return model(idx, idx)[1]

    assert kept_states_by_device(model, run, IDX.numel() * 16 * 5) == (1, 2, 1)


def links_of_operators(graph: Any) -> list[int]:
    """The rewrites that the backward of each fused operator of an FX graph applies again."""
    calls = [node for node in graph.nodes if "rewrite_read" in str(node.target)]
    lists = [[arg for arg in node.args if isinstance(arg, list | tuple)] for node in calls]
    return [sum(map(len, found)) // 4 for found in lists]


@pytest.mark.parametrize("how", ["torch.compile", "torch.export"])
def test_a_captured_graph_has_the_default_of_its_device(how):
    stream = make_stream()

    def captured(device: str) -> list[int]:
        x = embeddings(device)
        if how == "torch.export":
            return links_of_operators(torch.export.export(stream, (x,)).graph)
        torch._dynamo.reset()
        graphs = []

        def backend(module: torch.fx.GraphModule, inputs: Any) -> Any:
            graphs.append(module.graph)
            return module.forward

        torch.compile(stream, backend=backend, fullgraph=True)(x)
        (graph,) = graphs
        return links_of_operators(graph)

    def on_both() -> tuple[list[int], list[int]]:
        on_cpu = captured("cpu")
        with fake_gpu():
            replace_tensors(stream, "cuda")
            return on_cpu, captured("cuda")

    assert forked(on_both) == ([0, 1, 2, 3, 4, 5, 6, 7], [0, 1, 2, 3, 0, 1, 2, 3])


def test_without_gradients_nothing_is_carried():
    model = nanogpt(4, value_channels=2)
    first = model.transformer.h[0]  # type: ignore[union-attr]
    x = torch.randn(2, 5, 16)
    assert first(x).chain is not None
    with torch.no_grad():
        assert first(x).chain is None
