"""Hyper-connections against the published formulas, token by token, in float64."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from ddl.lab.config import GPTConfig
from ddl.models import GPT
from ddl.models.streams.connected import ConnectedStream, SumOfStreams
from ddl.models.streams.hyper import HyperConnection
from ddl.optim import parameter_groups
from tests.support.helpers import normal, randomise_

B, T, N, D, L = 2, 3, 4, 10, 5
F64 = torch.float64


def make() -> ConnectedStream:
    sublayers = [nn.Linear(D, D, bias=False) for _ in range(L)]
    connections = [HyperConnection(D, N, index) for index in range(L)]
    stream = ConnectedStream(
        *(sublayers, N),
        connections=connections,
        head=SumOfStreams(),
        norm=lambda: nn.RMSNorm(D, 1e-5),
    ).to(F64)
    randomise_(stream, std=0.7)
    return stream


def rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    return weight * x / (x.square().mean() + 1e-5).sqrt()


def by_the_paper(stream: ConnectedStream, x: Tensor) -> Tensor:
    """One token x (d,): eq. 10 to 13 for the connections, eq. 1 to 5 for what they do."""
    H = torch.stack([x] * N)  # (n, d)
    for F, norm, c in zip(stream.sublayers, stream.norms, stream.connections, strict=True):
        centred = H - H.mean(1, keepdim=True)
        variance = centred.square().mean(1, keepdim=True)
        H_bar = centred / (variance + c.norm.eps).sqrt() * c.norm.weight + c.norm.bias
        W_m, W_r = c.mix_map.weight[0], c.mix_map.weight[1:].T  # (d,), (d, n)
        A_m = c.mix_scale * torch.tanh(H_bar @ W_m) + c.mix[:, 0]
        A_r = c.mix_scale * torch.tanh(H_bar @ W_r) + c.mix[:, 1:]
        B_ = c.join_scale * torch.tanh(H_bar @ c.join_map.weight[0]) + c.join
        h_0 = sum(A_m[i] * H[i] for i in range(N))
        mixed = [sum(A_r[i, j] * H[i] for i in range(N)) for j in range(N)]
        out = F(rms_norm(h_0, norm.weight))
        H = torch.stack([mixed[j] + B_[j] * out for j in range(N)])
    return rms_norm(H.sum(0), stream.readout.weight)


def test_the_published_formulas() -> None:
    stream, x = make(), normal(B, T, D, dtype=F64)
    found = stream(x)
    for b in range(B):
        for t in range(T):
            expected = by_the_paper(stream, x[b, t])
            torch.testing.assert_close(found[b, t], expected, rtol=1e-12, atol=1e-12)


def test_gradients() -> None:
    stream, x = make(), normal(1, 2, D, dtype=F64).requires_grad_()
    assert torch.autograd.gradcheck(stream, (x,))
    stream(x).square().sum().backward()
    for name, parameter in stream.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.abs().max() > 0, name


def test_a_new_one_is_the_additive_stream() -> None:
    """Each input is one of the equal streams, and the final read's norm divides by their number."""
    config = GPTConfig(
        "additive", vocab_size=40, block_size=8, num_layers=2, num_heads=2, hidden_size=16
    )
    losses = []
    for residual in ("additive", "hc"):
        torch.manual_seed(3)
        model = GPT(replace(config, residual=residual)).to(F64)
        model.trunk.readout.eps = 0.0
        idx = torch.arange(8)[None]
        losses.append(model(idx, labels=idx).loss)
    torch.testing.assert_close(losses[0], losses[1], rtol=1e-12, atol=0)
    assert [c.mix[:, 0].argmax().item() for c in model.trunk.connections] == [0, 1, 2, 3]
    more = sum(p.numel() for p in model.trunk.connections.parameters())
    assert more == 4 * (4 * 5 + 4 + 2 * 16 + 16 * 6 + 2)


def test_only_the_maps_decay() -> None:
    decayed, kept = parameter_groups(HyperConnection(D, N, 0), weight_decay=0.1)
    assert sorted(tuple(p.shape) for p in decayed["params"]) == [(1, D), (N + 1, D)]
    shapes = sorted(tuple(p.shape) for p in kept["params"])
    assert shapes == [(1,), (1,), (N,), (N, N + 1), (D,), (D,)]


def test_it_learns_what_a_sum_of_streams_needs() -> None:
    """From its start all of its parameters move, and the loss falls."""
    torch.manual_seed(0)
    config = GPTConfig(
        "hc", vocab_size=16, block_size=16, num_layers=1, num_heads=2, hidden_size=16
    )
    model = GPT(config)
    idx = torch.arange(32).remainder(7).view(2, 16)
    start = {name: p.clone() for name, p in model.named_parameters()}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(30):
        loss = model(idx, labels=idx).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[0] == pytest.approx(math.log(16), abs=0.2)
    assert losses[-1] < 0.5 * losses[0]
    assert not [name for name, p in model.named_parameters() if torch.equal(p, start[name])]
