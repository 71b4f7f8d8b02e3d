"""DeltaStream on a sequence in pieces, and with padding."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ddl import DeltaStream
from ddl.nn import DeltaMixer
from ddl.nn.convolution import Slot
from ddl.nn.history import History
from tests.support.helpers import normal, randomise_

D = 12
STREAMS: dict[str, dict[str, Any]] = {
    "scalar": {},
    "channel": {"value_channels": 3, "compress": "channel"},
    "token": {"value_channels": 3, "compress": "token"},
    "token, one channel": {"compress": "token", "kernel_size": 3},
    "conv": {"value_channels": 3, "compress": "channel", "expand": "conv"},
    "token and conv": {"value_channels": 2, "compress": "token", "expand": "conv"},
    "two rewrites": {"value_channels": 3, "compress": "token", "rewrites": 2},
    "two rewrites, pooled": {"value_channels": 2, "rewrites": 2, "gate_from": "convolved"},
    "write-only": {"value_channels": 3, "compress": "token", "erase": "none", "rewrites": 2},
    "scaled": {"value_channels": 3, "branch_scale": 0.6},
    "v-Map": {"value_channels": 2, "compress": "token", "mapping": "v", "gate": "mlp"},
}
every_stream = pytest.mark.parametrize("options", STREAMS.values(), ids=STREAMS)


def make_stream(options: dict[str, Any]) -> DeltaStream:
    """A stream with per-token sublayers whose output is not zero for inputs of zero."""
    layers = [nn.Sequential(nn.Linear(D, D), nn.Tanh(), nn.Linear(D, D)) for _ in range(3)]
    stream = DeltaStream(D, layers, **options).double()
    randomise_(stream)
    return stream


def close(a: Tensor, b: Tensor) -> None:
    torch.testing.assert_close(a, b, rtol=0, atol=1e-12)


@every_stream
@pytest.mark.parametrize("pieces", [[1] * 9, [2, 7], [5, 1, 3]], ids=str)
@torch.no_grad()
def test_pieces_give_what_the_whole_gives(options, pieces):
    stream, x, history = make_stream(options), normal(2, 9, D), History()
    close(torch.cat([stream(p, history=history) for p in x.split(pieces, 1)], 1), stream(x))


@every_stream
def test_padding_does_not_leak_and_gets_no_gradient(options):
    stream, x = make_stream(options), normal(2, 9, D)
    keep = torch.ones(2, 9, dtype=torch.bool)
    keep[0, :4] = False
    x[0, :4] = torch.nan  # must not matter
    x.requires_grad_()
    padded = stream(x, keep=keep)
    close(padded[0, 4:], stream(x[:1, 4:])[0])
    close(padded[1], stream(x[1:])[0])
    (grad,) = torch.autograd.grad(padded[keep].square().sum(), x)
    alone = stream(x[:1, 4:]).square().sum() + stream(x[1:]).square().sum()
    (want,) = torch.autograd.grad(alone, x)
    close(grad, want)
    assert grad[0, :4].eq(0).all()


@every_stream
@pytest.mark.parametrize("tokens", [0, 1, 3, 5])
@torch.no_grad()
def test_tokens_that_are_cropped_leave_nothing(options, tokens):
    stream, x, history = make_stream(options), normal(2, 12, D), History(crops=5)
    for piece in x[:, :7].split([1, 4, 2], dim=1):
        stream(piece, history=history)
    history.crop(tokens)
    rest = torch.cat((x[:, : 7 - tokens], x[:, 7:]), 1)
    for piece in x[:, 7:].split([2, 3], dim=1):
        last = stream(piece, history=history)
    close(last, stream(rest)[:, -3:])
    history.crop(4)  # once more, over the place where it was cropped before
    again = stream(x[:, 8:], history=history)
    close(again, stream(rest)[:, -4:])


@torch.no_grad()
def test_a_history_may_be_cropped_to_nothing():
    stream, x, history = make_stream(STREAMS["token and conv"]), normal(1, 4, D), History(crops=4)
    stream(x, history=history)
    history.crop(4)
    close(stream(x[:, 1:], history=history), stream(x[:, 1:]))


@every_stream
@torch.no_grad()
def test_a_clone_goes_its_own_way_and_a_prompt_is_shared(options):
    stream, x, history = make_stream(options), normal(3, 9, D), History(crops=2)
    x[:, :5] = x[:1, :5]
    stream(x[:1, :5], history=history)
    prompt = history.clone()
    stream(x[:1, 5:], history=history)
    for kept in (prompt, prompt.clone()):
        kept.select(torch.zeros(3, dtype=torch.int64))  # a batch of 1 becomes one of 3
        close(stream(x[:, 5:], history=kept), stream(x)[:, 5:])
        kept.crop(2)
        close(stream(x[:, 7:], history=kept), stream(x)[:, 7:])
    close(stream(x[:1, :5]), stream(x[:1, :5], history=History()))


def test_histories_refuse_crops_that_they_have_no_inputs_for():
    with pytest.raises(ValueError, match=r"^`crops` must be 0 with static=True, got 3$"):
        History(static=True, crops=3)
    with pytest.raises(ValueError, match=r"^`crops` must be an integer of at least 0, got -1$"):
        History(crops=-1)
    with pytest.raises(ValueError, match=r"^`tokens` must be at most 2, got 3$"):
        History(crops=2).crop(3)
    starts, stream = torch.zeros(2, 4, dtype=torch.bool), make_stream(STREAMS["token"])
    expected = r"^`history` must be one with crops=0 for `document_starts`, got crops=2: "
    with torch.no_grad(), pytest.raises(ValueError, match=expected):
        stream(normal(2, 4, D), history=History(crops=2), document_starts=starts)
    mixer = DeltaMixer(8, 2).double()
    expected = r"^`history` must be one with crops=0, got crops=1: what `m.state` keeps is of all "
    with torch.no_grad(), pytest.raises(ValueError, match=expected):
        mixer(normal(1, 3, 8), slot=Slot(History(crops=1), "m"))


class InterruptionError(Exception):
    pass


@every_stream
@pytest.mark.parametrize("calls", [0, 1], ids=["first call", "second call"])
@torch.no_grad()
def test_an_interrupted_pass_can_be_repeated(options, calls):
    stream, x, history = make_stream(options), normal(2, 9, D), History()
    pieces = x.split([4, 5], dim=1)
    done = [stream(piece, history=history) for piece in pieces[:calls]]

    def interrupt(*_: Any) -> None:
        raise InterruptionError

    handle = stream.sublayers[2].register_forward_pre_hook(interrupt)
    with pytest.raises(InterruptionError):
        stream(pieces[calls], history=history)
    handle.remove()
    done += [stream(piece, history=history) for piece in pieces[calls:]]
    close(torch.cat(done, dim=1), stream(x))


def test_what_does_not_fit_is_refused():
    stream, x = make_stream({"value_channels": 2, "compress": "token"}), normal(2, 5, D)
    with pytest.raises(TypeError, match=r"^`keep` must have dtype torch.bool, got torch.int64$"):
        stream(x, keep=torch.ones(2, 5, dtype=torch.int64))
    with pytest.raises(ValueError, match=r"^`keep` must have shape \(2, 5\), got \(2, 4\)$"):
        stream(x, keep=torch.ones(2, 4, dtype=torch.bool))
    with pytest.raises(TypeError, match=r"^`keep` must be a torch.Tensor, got list$"):
        stream(x, keep=[True] * 5)
    expected = r"^`x` must have shape \(batch, time, 12\) with a history, got \(5, 12\)$"
    with pytest.raises(ValueError, match=expected):
        stream(x[0], history=History())
    with pytest.raises(ValueError, match=r"^`history` must be used under torch.no_grad"):
        stream(x, history=History())
    with torch.no_grad(), pytest.raises(ValueError, match=r"^`x` must have at least one token"):
        make_stream(STREAMS["token"])(normal(2, 0, D), history=History())
    stream.sublayers[1] = nn.Linear(D, D + 1)
    for given in ({}, {"history": History()}):
        with torch.no_grad(), pytest.raises(ValueError, match=r"^`sublayers\[1\]` must return sha"):
            stream.float()(x.float(), **given)


@torch.no_grad()
def test_a_history_resolves_the_parameters_once(monkeypatch):
    stream = make_stream({"value_channels": 2, "compress": "token"})
    calls = []
    weight = stream.readout.effective_weight
    monkeypatch.setattr(stream.readout, "effective_weight", lambda: calls.append(1) or weight())
    history, x = History(), normal(2, 6, D)
    pieces = [stream(piece, history=history) for piece in x.split(1, dim=1)]
    assert len(calls) == 1
    close(torch.cat(pieces, dim=1), stream(x))


@torch.no_grad()
def test_autocast_may_change_where_nothing_is_kept():
    """The calls are resolved again: they depend on autocast."""
    stream, x, history = make_stream(STREAMS["channel"]).float(), normal(2, 9, D).float(), History()
    with torch.autocast("cpu", torch.bfloat16):
        first = stream(x[:, :4], history=history)
    rest = stream(x[:, 4:], history=history)
    assert (first.dtype, rest.dtype) == (torch.bfloat16, torch.float32)
    torch.testing.assert_close(rest, stream(x)[:, 4:], rtol=0, atol=1e-5)
