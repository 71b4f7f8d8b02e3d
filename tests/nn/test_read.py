"""Read and Expand against the equations."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from ddl import Expand, Read, reference
from tests.support.helpers import assert_same_gradients, gradients, normal, randomise_
from tests.support.read_cases import READS, B, D, T, name_of
from tests.support.tolerances import assert_close

F64, F32 = torch.float64, torch.float32


def make_read(dtype: torch.dtype = F64, **options: Any) -> Read:
    read = Read(D, **options).to(dtype)
    randomise_(read)
    return read


def state_like(m: int, dtype: torch.dtype = F64) -> Tensor:
    return normal(*((B, T, D) if m == 1 else (B, T, D, m)), dtype=dtype).requires_grad_()


def compress_by_hand(read: Read, X: Tensor) -> Tensor:
    """x (B, T, d) by convolutions, as the papers' code writes them."""
    X = X[..., None] if read.value_channels == 1 else X
    m, K = X.shape[-1], read.kernel_size
    if read.compress == "identity":
        return X[..., 0]
    if read.compress == "token":
        if read.compress_parameterization == "direct":
            taps, weights = read.compress_weight, torch.ones(m, dtype=X.dtype)
        else:
            taps, weights = read.compress_kernel, read.compress_read
        channels = X.permute(0, 2, 3, 1).reshape(B, D * m, T)
        conv = taps.reshape(D * m, 1, K).flip(-1)  # conv1d's last tap is the current token
        y = F.conv1d(F.pad(channels, (K - 1, 0)), conv, groups=D * m)
        return (y.reshape(B, D, m, T) * weights[:, None]).sum(2).mT
    if read.compress_parameterization == "direct":
        return torch.einsum("btdm,dm->btd", X, read.compress_weight)
    left = K - 1 if read.causal else (K - 1) // 2
    rows = F.pad(X.reshape(B * T, D, m), (left, K - 1 - left))  # same-padded over value channels
    y = F.conv1d(rows, read.compress_kernel[:, None], groups=D).reshape(B, T, D, m)
    return y @ read.compress_read


def read_by_hand(read: Read, X: Tensor) -> Tensor:
    x = compress_by_hand(read, X)
    return F.rms_norm(x, (D,), read.norm_weight, read.norm_eps)


@pytest.mark.parametrize("dtype", [F64, F32], ids=str)
@pytest.mark.parametrize("options", READS, ids=name_of)
def test_read_and_its_gradients(options: dict[str, Any], dtype: torch.dtype) -> None:
    read, exact = make_read(dtype, **options), make_read(**options)
    X, X64 = (state_like(options["value_channels"], t) for t in (dtype, F64))
    expected, actual = read_by_hand(exact, X64), read(X)
    assert actual.dtype == dtype
    assert_close("context", actual, expected, dtype)
    named, named64 = (
        gradients(actual, {"state": X}, read),
        gradients(expected, {"state": X64}, exact),
    )
    assert_same_gradients(named, named64, dtype)
    context, compressed = read(X, return_compressed=True)
    assert_close("context", context, expected, dtype)
    assert_close("compressed", compressed, compress_by_hand(exact, X64), dtype)


@pytest.mark.parametrize("options", READS, ids=name_of)
def test_read_starts_as_the_mean_over_value_channels(options: dict[str, Any]) -> None:
    X = state_like(options["value_channels"], F32)
    mean = X if options["value_channels"] == 1 else X.mean(-1)
    read = Read(D, **options)
    assert_close("x", read(X, return_compressed=True)[1], mean, F32)
    assert_close("h", read(X), F.rms_norm(mean, (D,), eps=1e-5), F32)


@pytest.mark.parametrize("read_init", [0.0, 0.7, -2.0])
@pytest.mark.parametrize("options", READS[1:], ids=name_of)
def test_read_starts_with_equal_weights(options: dict[str, Any], read_init: float) -> None:
    """x = read_init·Σ_j X_j at initialisation, of a shared read as well; None is 1/m."""
    m = options["value_channels"]
    X = state_like(m)
    summed = X if m == 1 else X.sum(-1)
    read = Read(D, read_init=read_init, dtype=F64, **options)
    shared = Read(D, m, compress=options["compress"], shared=read, dtype=F64)
    for each in (read, shared):
        assert_close("x", each(X, return_compressed=True)[1], read_init * summed, F64)
    if read.compress_parameterization == "factored":
        assert read.compress_read.tolist() == [read_init] * m
    randomise_(read)
    read.reset_parameters()
    assert_close("x", read(X, return_compressed=True)[1], read_init * summed, F64)
    mean = Read(D, dtype=F64, **options)
    with torch.no_grad():
        for parameter, other in zip(read.parameters(), mean.parameters(), strict=True):
            other.copy_(parameter)
    mean.reset_parameters()
    assert_close("x", mean(X, return_compressed=True)[1], summed / m, F64)


def test_a_shared_read_follows_its_owner_with_a_norm_of_its_own() -> None:
    owner = make_read(value_channels=3, compress="channel")
    shared = Read(D, 3, compress="channel", shared=owner).to(F64)
    assert [name for name, _ in shared.named_parameters()] == ["norm_weight"]
    X = state_like(3)
    with torch.no_grad():
        owner.compress_weight.mul_(-2)
    unit = F.rms_norm(compress_by_hand(owner, X), (D,), eps=1e-5)
    assert_close("h", shared(X), unit, F64)


@pytest.mark.parametrize("m", [1, 3])
@pytest.mark.parametrize("kind", ["repeat", "conv"])
def test_expand(m: int, kind: str) -> None:
    taps = {"kernel_size": 3} if kind == "conv" else {}
    x, module = normal(B, T, D).requires_grad_(), Expand(D, m, kind=kind, **taps).to(F64)
    repeated = x if m == 1 else x[..., None].expand(B, T, D, m)
    assert torch.equal(module(x), repeated)
    randomise_(module)
    expected = reference.expand(x, module.weight, value_channels=m).reshape(repeated.shape)
    assert_close("X", module(x), expected, F64)
    actual, exact = (gradients(y, {"x": x}, module) for y in (module(x), expected))
    assert_same_gradients(actual, exact, F64)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({}, ""),
        ({"compress": "channel"}, ", compress='channel'"),
        (
            {"compress": "channel", "compress_parameterization": "factored", "kernel_size": 3},
            ", compress='channel', kernel_size=3, compress_parameterization='factored'",
        ),
        ({"compress": "channel", "read_init": 0.5}, ", compress='channel', read_init=0.5"),
    ],
)
def test_extra_repr_of_a_read(options: dict[str, Any], text: str) -> None:
    """Options that are not at their defaults are shown, by a shared read its owner's."""
    owner = Read(8, **options)
    text = f"hidden_size=8{text}"
    assert owner.extra_repr() == text
    compress = options.get("compress", "identity")
    assert Read(8, compress=compress, shared=owner).extra_repr() == f"{text}, shared"
