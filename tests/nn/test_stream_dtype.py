"""stream_dtype: the states are stored in half precision under autocast; else nothing changes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ddl import DeltaStream, nanogpt
from ddl.errors import InputError
from ddl.lab.config import GPTConfig
from ddl.models import GPT, Cache
from ddl.nn.history import History
from ddl.nn.trunk import as_stream
from tests.support import nanogpt_standin
from tests.support.helpers import randomise_

D, TIME = 16, 9
STREAMS: dict[str, dict[str, Any]] = {
    "scalar": {},
    "channel": {"value_channels": 3, "compress": "channel"},
    "token and conv": {"value_channels": 2, "compress": "token", "expand": "conv"},
    "v-Map": {"value_channels": 2, "compress": "token", "mapping": "v", "gate_from": "pooled"},
}
every_stream = pytest.mark.parametrize("options", STREAMS.values(), ids=STREAMS)
half = pytest.mark.parametrize("dtype", ["bfloat16", "float16"])


def make_stream(options: dict[str, Any]) -> DeltaStream:
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(D, D), nn.Tanh(), nn.Linear(D, D)) for _ in range(3)]
    stream = DeltaStream(D, layers, **options)
    randomise_(stream)
    return stream


def step(stream: nn.Module, x: Tensor) -> list[Tensor]:
    """The readout and all gradients."""
    stream.zero_grad()
    h = stream(x)
    h.float().square().sum().backward()
    return [h, *(p.grad for p in stream.parameters() if p.grad is not None)]


def assert_same_bits(actual: list[Tensor], expected: list[Tensor]) -> None:
    assert len(actual) == len(expected)
    for got, wanted in zip(actual, expected, strict=True):
        assert got.dtype == wanted.dtype
        assert torch.equal(got, wanted)


@half
@every_stream
def test_under_autocast_the_states_have_it(options, dtype):
    x = torch.randn(2, TIME, D)
    with torch.autocast("cpu", torch.bfloat16):
        expected = step(make_stream(options), x.to(getattr(torch, dtype)))
        actual = step(make_stream(options | {"stream_dtype": dtype}), x)
        wide = step(make_stream(options), x)
    assert_same_bits(actual, expected)
    assert not torch.equal(actual[0], wide[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@every_stream
def test_without_autocast_nothing_changes(options, dtype):
    x = torch.randn(2, TIME, D, dtype=dtype)
    expected = step(make_stream(options).to(dtype), x)
    assert_same_bits(
        step(make_stream(options | {"stream_dtype": "bfloat16"}).to(dtype), x), expected
    )


def test_float64_keeps_its_precision_under_autocast():
    x = torch.randn(2, TIME, D, dtype=torch.float64)
    stream = make_stream({"stream_dtype": "bfloat16"}).double()
    assert as_stream(x, "bfloat16") is x
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        assert as_stream(x, "bfloat16") is x
    assert stream(x).dtype == torch.float64


@every_stream
@torch.no_grad()
def test_pieces_give_what_the_whole_gives(options):
    stream, x = make_stream(options | {"stream_dtype": "bfloat16"}), torch.randn(2, TIME, D)
    history = History()
    with torch.autocast("cpu", torch.bfloat16):
        pieces = [stream(piece, history=history) for piece in x.split([4, 1, 4], dim=1)]
        torch.testing.assert_close(torch.cat(pieces, 1), stream(x), rtol=0.05, atol=0.05)


@torch.no_grad()
def test_a_history_keeps_to_one_dtype():
    stream = make_stream(STREAMS["token and conv"] | {"stream_dtype": "bfloat16"})
    x, history = torch.randn(2, TIME, D), History()
    with torch.autocast("cpu", torch.bfloat16):
        stream(x, history=history)
    expected = "^`history` must be used in one dtype, got torch.float32 after torch.bfloat16$"
    with pytest.raises(ValueError, match=expected):
        stream(x, history=history)


def test_a_model_trains_and_generates_with_it():
    sizes = {"vocab_size": 61, "block_size": 16, "num_layers": 2, "num_heads": 2, "hidden_size": 32}
    model = GPT(GPTConfig(residual="ddl-tc", stream_dtype="bfloat16", **sizes))
    idx = torch.randint(61, (2, 16))
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(idx, labels=idx).loss
        cache = Cache(model.config)
        with torch.no_grad():
            assert model(idx, cache=cache).logits.isfinite().all()
    loss.backward()
    assert all(p.grad.isfinite().all() for p in model.parameters())


def test_a_converted_model_has_it():
    model = nanogpt_standin.GPT(nanogpt_standin.GPTConfig())
    nanogpt.convert(model, value_channels=2, stream_dtype="bfloat16")
    seen = []
    model.transformer.h[0].register_forward_hook(lambda *call: seen.append(call[2].state.dtype))
    idx = torch.randint(64, (2, 16))
    with torch.autocast("cpu", torch.bfloat16):
        model(idx, idx)[1].backward()
    model(idx, idx)
    assert seen == [torch.bfloat16, torch.float32]


def test_what_does_not_fit_is_refused():
    expected = """`stream_dtype` must be "bfloat16" or "float16" or None, got 'float32'"""
    with pytest.raises(InputError) as refusal:
        make_stream({"stream_dtype": "float32"})
    assert str(refusal.value) == expected
    known = "`stream_dtype` must be left at None unless residual="
    with pytest.raises(InputError, match=f"^{known}"):
        GPTConfig(residual="additive", stream_dtype="bfloat16")
