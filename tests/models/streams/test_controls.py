"""The controls of DDL, additive-conv and expanded, against their equations."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import prune

from ddl.lab.config import GPTConfig
from ddl.models import GPT, Cache
from ddl.models.streams.controls import ConvolvedStream, ExpandedStream
from ddl.optim import never_decayed
from tests.support.helpers import gradients, normal, randomise_

B, T, D, L = 2, 6, 10, 5
CONFIG = GPTConfig(
    "additive-conv", vocab_size=32, block_size=16, num_layers=2, num_heads=2, hidden_size=16
)
IDX = torch.arange(24).view(2, 12).remainder(32)


def make(shared: int, taps: int) -> ConvolvedStream:
    sublayers = [nn.Linear(D, D, bias=False) for _ in range(L)]
    options: dict[str, Any] = {"sublayers_per_compressor": shared, "kernel_size": taps}
    stream = ConvolvedStream(D, sublayers, norm_eps=1e-5, **options)
    randomise_(stream.double(), std=0.7)
    return stream


def by_the_equation(stream: ConvolvedStream, x: Tensor, shared: int, taps: int) -> Tensor:
    """Sublayer i reads with the convolution of the first of its group, the last read its own."""
    weights = [stream.reads[i - i % shared].compress_weight for i in range(L)]
    norms = [read.norm_weight for read in (*stream.reads, stream.readout)]
    for i, weight in enumerate([*weights, stream.readout.compress_weight]):
        convolved = torch.zeros_like(x)
        for s in range(taps):
            convolved[:, s:] += weight[:, 0, s] * x[:, : x.shape[1] - s]
        h = convolved / (convolved.square().mean(-1, keepdim=True) + 1e-5).sqrt() * norms[i]
        if i == L:
            return h
        x = x + stream.sublayers[i](h)
    raise AssertionError


@pytest.mark.parametrize(("shared", "taps"), [(1, 3), (2, 4), (3, 2), (9, 1)])
def test_the_equation_of_additive_conv(shared: int, taps: int) -> None:
    stream, x = make(shared, taps), normal(B, T, D)
    expected = by_the_equation(stream, x, shared, taps)
    torch.testing.assert_close(stream(x), expected, rtol=1e-12, atol=1e-12)
    names = {name for name, _ in stream.named_parameters() if "compress" in name}
    firsts = {f"reads.{i}.compress_weight" for i in range(0, L, shared)}
    assert names == firsts | {"readout.compress_weight"}


def test_padding_stays_zero_whatever_a_sublayer_makes_of_it() -> None:
    """A sublayer with a bias writes to padding, which a convolution would carry into a token."""
    stream, x = make(2, 3), normal(B, T, D)
    for sublayer in stream.sublayers:
        sublayer.bias = nn.Parameter(normal(D, seed=1))
    keep = torch.tensor([[1, 0, 1, 1, 0, 1], [0, 0, 1, 1, 1, 1]]).bool()
    mask = keep.unsqueeze(-1)
    state = x * mask
    for read, sublayer in zip(stream.reads, stream.sublayers, strict=True):
        state = state + sublayer(read(state)) * mask
    torch.testing.assert_close(stream(x, keep=keep), stream.readout(state), rtol=1e-12, atol=1e-12)


def test_a_convolution_over_one_token_can_be_cached() -> None:
    model = GPT(replace(CONFIG, compress_kernel_size=1)).requires_grad_(False)
    randomise_(model.trunk, std=0.4)
    cache = Cache(model.config)
    logits = [model(piece, cache=cache).logits for piece in IDX.split([5, 1, 6], 1)]
    torch.testing.assert_close(torch.cat(logits, 1), model(IDX).logits, rtol=0, atol=2e-5)


def test_a_pruned_norm_of_a_shared_read_is_formed_for_the_cache() -> None:
    model = GPT(CONFIG).requires_grad_(False)
    randomise_(model.trunk, std=0.4)
    prune.identity(model.trunk.reads[1], "norm_weight")
    model(IDX)
    model.trunk.reads[1].norm_weight_orig.mul_(3)
    cached = model(IDX, cache=Cache(model.config)).logits
    torch.testing.assert_close(cached, model(IDX).logits, rtol=0, atol=2e-5)


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize(
    "options",
    [
        {"value_channels": 3},
        {"value_channels": 1, "sublayers_per_compressor": 1, "read_init": 0.3},
        {"compress_parameterization": "factored", "compress_kernel_size": 3},
    ],
)
def test_the_equation_of_expanded(options: dict[str, Any], scaled: bool) -> None:
    """States of all sublayers, the final read and every gradient by name."""
    depth: dict[str, Any] = {"parameterization": "completep", "base_width": 16, "base_layers": 1}
    model = GPT(replace(CONFIG, residual="expanded", **options, **(depth if scaled else {})))
    stream, x = model.double().trunk, normal(2, 6, 16).requires_grad_()
    assert isinstance(stream, ExpandedStream)
    randomise_(stream, std=0.4)
    X = x.unsqueeze(-1).repeat(1, 1, 1, model.config.value_channels)
    for read, sublayer, part in zip(stream.reads, stream.sublayers, stream.residuals, strict=True):
        compressed = (X * read.effective_weight()).sum(-1)
        rms = (compressed.square().mean(-1, keepdim=True) + 1e-5).sqrt()
        h = compressed / rms * read.norm_weight
        beta = 2 * torch.sigmoid(h @ part.gate.weight.T + part.gate.bias)
        v = h @ part.value.weight.T + part.value.bias
        X = X + (0.5 if scaled else 1) * (beta * v).unsqueeze(-2) * sublayer(h).unsqueeze(-1)
    expected = gradients(stream.read_out(X), {"x": x}, stream)
    for name, found in gradients(stream(x), {"x": x}, stream).items():
        torch.testing.assert_close(found, expected[name], rtol=1e-12, atol=1e-12, msg=name)


def test_a_new_expanded_stream_adds_to_the_mean_of_its_channels() -> None:
    """β v = 1, if the weights of the values are 0; no others are drawn."""
    stream = GPT(replace(CONFIG, residual="expanded")).trunk
    for part in stream.residuals:
        nn.init.zeros_(part.value.weight)
    plain = GPT(replace(CONFIG, residual="additive")).trunk
    plain.sublayers.load_state_dict(stream.sublayers.state_dict())
    x = normal(2, 6, 16, dtype=torch.float32)
    torch.testing.assert_close(stream(x), plain(x))


def test_a_wrapped_part_of_an_expanded_stream_is_refused_by_name() -> None:
    for path in ("reads.1", "readout", "residuals.0.gate"):
        stream = GPT(replace(CONFIG, residual="expanded")).trunk
        stream.set_submodule(path, nn.Sequential(stream.get_submodule(path)))
        name = path.replace("reads.1", r"reads\[1\]").replace("residuals.0.", "")
        with pytest.raises(TypeError, match=f"^`{name}` must be a "):
            stream(normal(1, 2, 16, dtype=torch.float32))


@torch.no_grad()
@pytest.mark.parametrize(
    ("path", "name"), [("reads.1", "norm_weight"), ("reads.0", "compress_weight")]
)
def test_a_pruned_read_of_an_expanded_stream_is_formed(path: str, name: str) -> None:
    stream, x = GPT(replace(CONFIG, residual="expanded")).trunk, normal(1, 2, 16).float()
    plain = copy.deepcopy(stream)
    getattr(plain.get_submodule(path), name).mul_(3)
    part = prune.identity(stream.get_submodule(path), name)
    getattr(part, f"{name}_orig").mul_(3)
    assert torch.equal(stream(x), plain(x))


def test_only_the_sublayers_of_an_expanded_stream_are_decayed() -> None:
    trunk = GPT(replace(CONFIG, residual="expanded")).trunk
    others = set(trunk.parameters()) - set(never_decayed(trunk))
    matrices = {p for p in trunk.sublayers.parameters() if p.ndim == 2}
    assert matrices <= others <= set(trunk.sublayers.parameters())
