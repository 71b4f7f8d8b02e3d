"""Attention residuals against their equations, written out token by token, in float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from ddl.models.streams.attention_residual import AttentionResidualStream
from tests.support.helpers import normal, randomise_

B, T, D, L, EPS = 2, 3, 10, 5, 1e-5
F64 = torch.float64


def make(per_block: int) -> AttentionResidualStream:
    sublayers = [nn.Linear(D, D, bias=False) for _ in range(L)]
    stream = AttentionResidualStream(D, sublayers, sublayers_per_block=per_block, norm_eps=EPS)
    randomise_(stream.to(F64), std=0.9)
    return stream


def rms(x: Tensor) -> Tensor:
    return x / (x.square().mean() + EPS).sqrt()


def attended(values: list[Tensor], query: Tensor) -> Tensor:
    powers = [torch.exp(query @ rms(v)) for v in values]
    return torch.stack([p / sum(powers) * v for p, v in zip(powers, values, strict=True)]).sum(0)


def by_the_equations(stream: AttentionResidualStream, x: Tensor, per_block: int) -> Tensor:
    """One token x (d,): every output is kept, and summed with those of its block."""
    written: list[Tensor] = []

    def values() -> list[Tensor]:
        blocks = [written[i : i + per_block] for i in range(0, len(written), per_block)]
        return [x, *(torch.stack(block).sum(0) for block in blocks)]

    read = x
    for F, norm, query in zip(stream.sublayers, stream.norms, stream.queries, strict=True):
        written.append(F(rms(read) * norm.weight))
        read = attended(values(), query)
    return rms(read) * stream.readout.weight


@pytest.mark.parametrize("per_block", [1, 2, 3, 5, 9])
def test_the_equations(per_block: int) -> None:
    stream, x = make(per_block), normal(B, T, D, dtype=F64)
    found = stream(x)
    for b in range(B):
        for t in range(T):
            expected = by_the_equations(stream, x[b, t], per_block)
            torch.testing.assert_close(found[b, t], expected, rtol=1e-12, atol=1e-12)


def test_gradients() -> None:
    stream, x = make(2), normal(1, 2, D, dtype=F64).requires_grad_()
    assert torch.autograd.gradcheck(stream, (x,))
    stream(x).square().sum().backward()
    for name, parameter in stream.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.abs().max() > 0, name


def test_what_the_last_read_makes_of_all_sums() -> None:
    stream, x = make(2), normal(B, T, D, dtype=F64)
    seen: list = []
    stream.hooks = (seen.append,)
    h = stream(x)
    assert [addition.state.shape[-1] for addition in seen] == [4] * L
    torch.testing.assert_close(stream.read_out(seen[-1].after()), h, rtol=1e-12, atol=1e-12)
