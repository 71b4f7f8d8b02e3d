"""DeltaStream: the fused trunk against a loop of Read, sublayer and DeltaResidual."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from ddl import DeltaStream, functional
from ddl.nn import History
from tests.support.helpers import assert_same_gradients, gradients, normal, randomise_
from tests.support.read_cases import READS, B, D, T, name_of
from tests.support.tolerances import assert_close

F64, F32 = torch.float64, torch.float32


class Sublayer(nn.Module):
    """A minimal sublayer that mixes tokens causally and mixes features."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(D, 2 * D), nn.Linear(2 * D, D)

    def forward(self, h: Tensor, scale: float = 1.0, *, shift: float = 0.0) -> Tensor:
        past = h.cumsum(1) / torch.ones_like(h).cumsum(1)
        return scale * self.down(torch.tanh(self.up(h + past))) + shift


def make_stream(dtype: torch.dtype = F64, layers: int = 4, **options: Any) -> DeltaStream:
    stream = DeltaStream(D, [Sublayer() for _ in range(layers)], **options).to(dtype)
    randomise_(stream)
    return stream


def by_loop(stream: DeltaStream, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """The same trunk, written without DeltaStream."""
    X = stream.expand(x)
    for read, F_l, residual in zip(stream.reads, stream.sublayers, stream.residuals, strict=True):
        h, raw = read(X, return_compressed=True)
        X = residual(X, F_l(h, *args, **kwargs), context=h, compressed=raw)
    return stream.readout(X)


RESIDUALS: list[dict[str, Any]] = [
    {"mapping": "k", "gate": "linear", "value": "linear", "value_from": "context"},
    {"mapping": "k", "gate": "mlp", "value": "linear", "value_from": "compressed"},
    {"mapping": "k", "gate": "linear", "value": "sigmoid", "value_from": "compressed"},
    {"mapping": "k", "gate": "mlp", "value": "sigmoid", "value_from": "context", "gate_hidden": 5},
    {"mapping": "k", "gate": "linear", "value": "constant"},
    {"mapping": "k", "gate": "mlp", "value": "constant", "eps_k": 0.2},
    {"mapping": "v", "gate": "linear", "value": "linear"},
    {"mapping": "v", "gate": "mlp", "value": "sigmoid"},
    {"rewrites": 2, "value": "linear"},
    {"rewrites": 3, "direction_rank": 2, "gate": "mlp", "value": "constant"},
    {"rewrites": 2, "gate_from": "pooled", "value": "sigmoid", "value_from": "compressed"},
    {"erase": "none"},
    {"erase": "none", "value": "sigmoid", "branch_scale": 0.6},
    {"erase": "none", "rewrites": 2, "gate": "mlp"},
    {"erase": "none", "mapping": "v", "gate_from": "flatten"},
    {"gate_from": "convolved", "value": "constant"},
]


@pytest.mark.table
@pytest.mark.parametrize("dtype", [F64, F32], ids=str)
@pytest.mark.parametrize("expand", ["repeat", "conv"])
@pytest.mark.parametrize("residual", RESIDUALS, ids=name_of)
@pytest.mark.parametrize("read", READS, ids=name_of)
def test_stream_is_the_loop(
    read: dict[str, Any], residual: dict[str, Any], expand: str, dtype: torch.dtype
) -> None:
    """Output and every gradient of the fused trunk, from the same parameters."""
    stream = make_stream(dtype, **read, **residual, expand=expand)
    x = normal(B, T, D, dtype=dtype).requires_grad_()
    actual, expected = stream(x, 0.7, shift=0.1), by_loop(stream, x, 0.7, shift=0.1)
    assert_close("readout", actual, expected, dtype, depth=4)
    named, expected_named = (gradients(y, {"x": x}, stream) for y in (actual, expected))
    assert_same_gradients(named, expected_named, dtype, depth=4)


@pytest.mark.parametrize("history", [False, True], ids=["whole", "cached"])
@torch.no_grad()
def test_sublayers_may_be_called_with_arguments_of_their_own(history: bool) -> None:
    stream, x = make_stream(value_channels=2), normal(B, T, D)
    scales, seen = [0.5, 2.0, -1.0, 3.0], []

    def call(index: int, sublayer: nn.Module, h: Tensor) -> Tensor:
        seen.append((index, sublayer))
        return sublayer(h, scales[index], shift=float(index))

    h = stream(x, call=call, history=History() if history else None)
    assert seen == list(enumerate(stream.sublayers))
    X = stream.expand(x)
    parts = zip(stream.reads, stream.sublayers, stream.residuals, scales, strict=True)
    for index, (read, sublayer, residual, scale) in enumerate(parts):
        h_l = read(X)
        X = residual(X, sublayer(h_l, scale, shift=float(index)), context=h_l)
    torch.testing.assert_close(h, stream.readout(X))


def test_a_norm_without_a_weight() -> None:
    options: dict[str, Any] = {"value_channels": 3, "compress": "token", "norm_eps": 0.1}
    plain, x = make_stream(**options, norm_affine=False), normal(B, T, D)
    names = {name for name, _ in plain.named_parameters()}
    scaled = DeltaStream(D, plain.sublayers, **options).double()
    assert names == {n for n, _ in scaled.named_parameters() if not n.endswith("norm_weight")}
    missing = scaled.load_state_dict(plain.state_dict(), strict=False).missing_keys  # γ is 1
    assert len(missing) == 5
    torch.testing.assert_close(plain(x), scaled(x))
    torch.testing.assert_close(plain(x), by_loop(plain, x))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("autocast", [False, True])
def test_stream_in_half_precision(dtype: torch.dtype, autocast: bool) -> None:
    """The result is near that in float64 and gradients are finite; also float32 under autocast."""
    stored = F32 if autocast else dtype
    stream, exact = (make_stream(t, 2, value_channels=3, expand="conv") for t in (stored, F64))
    x = normal(B, T, D, dtype=stored).requires_grad_()
    with torch.autocast("cpu", dtype, enabled=autocast):
        h = stream(x)
    assert h.dtype == dtype
    # The error is that of four layers of matrix products in half precision, not of our operators.
    error = (h.double() - exact(x.double())).square().mean().sqrt()
    assert error < 8 * torch.finfo(dtype).eps
    for name, gradient in gradients(h, {"x": x}, stream).items():
        assert gradient.isfinite().all(), name


@pytest.mark.parametrize("every", [1, 2, 3, 9])
def test_sublayers_per_compressor(every: int) -> None:
    """Each group of consecutive sublayers has one compression; norms are never shared."""
    stream = make_stream(layers=5, value_channels=3, sublayers_per_compressor=every)
    owners = [i for i, read in enumerate(stream.reads) if read.compress_weight is not None]
    assert owners == list(range(0, 5, every))
    assert stream.readout.compress_weight is not None
    assert len({id(read.norm_weight) for read in (*stream.reads, stream.readout)}) == 6
    x = normal(B, T, D)
    assert_close("readout", stream(x), by_loop(stream, x), F64)


def test_the_defaults_of_compress() -> None:
    assert {read.compress for read in make_stream(value_channels=1).reads} == {"identity"}
    assert {read.compress for read in make_stream(value_channels=2).reads} == {"channel"}


@pytest.mark.parametrize("compress", ["channel", "token"])
def test_stream_is_causal(compress: str) -> None:
    stream = make_stream(value_channels=3, compress=compress, expand="conv")
    x = normal(1, T, D)
    before = stream(x)
    for t in range(T):
        changed = x.clone()
        changed[:, t] += 1
        touched = (stream(changed) != before).any(-1)[0]
        assert touched.tolist() == [u >= t for u in range(T)]


def test_a_gate_that_is_closed_leaves_the_embeddings() -> None:
    """β → 0: the final read is that of the expanded embeddings, whatever the sublayers return."""
    stream = make_stream(value_channels=3)
    for residual in stream.residuals:
        nn.init.zeros_(residual.gate.weight)
        nn.init.constant_(residual.gate.bias, -1000.0)
    x = normal(B, T, D)
    assert torch.equal(stream(x), stream.readout(stream.expand(x)))


@pytest.mark.parametrize("read", READS, ids=name_of)
def test_copies_compute_the_same(read: dict[str, Any]) -> None:
    stream, x = make_stream(F32, **read, expand="conv"), normal(B, T, D, dtype=F32)
    expected = stream(x)
    fresh = DeltaStream(D, [Sublayer() for _ in range(4)], **read, expand="conv")
    assert not torch.equal(fresh(x), expected)
    fresh.load_state_dict(stream.state_dict())
    for twin in (copy.deepcopy(stream), pickle.loads(pickle.dumps(stream)), fresh):
        assert torch.equal(twin(x), expected)
        with torch.no_grad():  # a copy must not share the original's compression
            for parameter in twin.parameters():
                parameter.zero_()
        assert torch.equal(stream(x), expected)
        assert not twin(x).any()


@pytest.mark.parametrize("read", READS, ids=name_of)
def test_meta_device_and_reset(read: dict[str, Any]) -> None:
    """A module built on meta, then given memory and reset, equals one built directly."""
    options = {**read, "expand": "conv", "gate": "mlp"}
    with torch.device("meta"):
        stream = DeltaStream(D, [Sublayer() for _ in range(3)], **options)
    result = stream(torch.empty(B, T, D, device="meta"))
    assert (result.device.type, result.shape) == ("meta", (B, T, D))
    stream.to_empty(device="cpu")
    for parameter in stream.parameters():
        nn.init.constant_(parameter, torch.nan)
    torch.manual_seed(1)
    stream.reset_parameters()
    built = DeltaStream(D, [nn.Identity() for _ in range(3)], **options)
    torch.manual_seed(1)
    built.reset_parameters()
    for name, parameter in built.named_parameters():
        assert torch.equal(parameter, stream.get_parameter(name)), name
    kept = [p for name, p in stream.named_parameters() if name.startswith("sublayers.")]
    assert all(p.isnan().all() for p in kept)  # the stream does not reset the sublayers


def test_to_moves_every_parameter() -> None:
    stream = make_stream(F32, value_channels=3, compress="token", expand="conv")
    assert {p.dtype for p in stream.to(torch.bfloat16).parameters()} == {torch.bfloat16}
    x = normal(B, T, D, dtype=torch.bfloat16)
    assert stream(x).dtype == torch.bfloat16


def test_extra_repr() -> None:
    stream = DeltaStream(8, [nn.Identity()] * 2, value_channels=4, compress="token", expand="conv")
    text = repr(stream)
    for line in (
        "Read(hidden_size=8, value_channels=4, compress='token')",
        "Read(hidden_size=8, value_channels=4, compress='token', shared)",
        "Expand(hidden_size=8, value_channels=4, kind='conv')",
    ):
        assert line in text


def test_sublayers_of_every_kind_of_sequence() -> None:
    modules = [nn.Identity(), nn.Tanh()]
    for given in (modules, tuple(modules), iter(modules), nn.ModuleList(modules)):
        assert list(DeltaStream(8, given).sublayers) == modules


def test_numpy_integers_are_integers() -> None:
    four, two = np.int64(4), np.int32(2)
    stream = DeltaStream(
        np.int64(8),
        [nn.Identity()],
        value_channels=two,
        compress="token",
        kernel_size=four,
        expand="conv",
        expand_kernel_size=two,
        sublayers_per_compressor=np.uint8(1),
        gate="mlp",
        gate_hidden=np.int16(3),
    )
    assert stream(torch.zeros(2, 3, 8)).shape == (2, 3, 8)
    assert functional.expand(torch.zeros(2, 8), value_channels=four).shape == (2, 8, 4)
