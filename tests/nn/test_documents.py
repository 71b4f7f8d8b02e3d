"""The modules on sequences that hold several documents: each is as it would be alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ddl import DeltaResidual, Expand, Read
from ddl.nn.history import History
from tests.nn import test_stream_history
from tests.nn.test_stream_history import D, close, make_stream
from tests.support.helpers import documents, normal, randomise_

TIME = 9
STREAMS: dict[str, dict[str, Any]] = test_stream_history.STREAMS | {
    "every state stored": {"value_channels": 2, "compress": "token", "anchor_every": 1},
    "convolved gate": {"value_channels": 2, "gate_from": "convolved", "expand": "conv"},
}
every_stream = pytest.mark.parametrize("options", STREAMS.values(), ids=STREAMS)
STARTS = torch.tensor([[1, 0, 0, 1, 1, 0, 0, 0, 1], [0, 0, 0, 0, 1, 0, 0, 0, 0]]).bool()


@every_stream
def test_a_document_gets_what_it_gets_alone(options):
    stream, x = make_stream(options), normal(2, TIME, D).requires_grad_()
    leaves = [x, *stream.parameters()]
    packed = stream(x, document_starts=STARTS)
    alone = [stream(x[i : i + 1, tokens])[0] for i, tokens in documents(STARTS)]
    close(packed.flatten(0, 1), torch.cat(alone))
    expected = torch.autograd.grad(sum(h.sin().sum() for h in alone), leaves, allow_unused=True)
    found = torch.autograd.grad(packed.sin().sum(), leaves, allow_unused=True)
    for gradient, wanted in zip(found, expected, strict=True):
        assert (gradient is None) == (wanted is None)
        if wanted is not None:
            close(gradient, wanted)


@every_stream
def test_the_stream_is_the_loop_over_its_parts(options):
    stream, x = make_stream(options), normal(2, TIME, D)
    state = stream.expand(x, document_starts=STARTS)
    for read, sublayer, residual in zip(
        stream.reads, stream.sublayers, stream.residuals, strict=True
    ):
        h, raw = read(state, return_compressed=True, document_starts=STARTS)
        state = residual(state, sublayer(h), context=h, compressed=raw, document_starts=STARTS)
    h = stream.readout(state, document_starts=STARTS)
    close(stream(x, document_starts=STARTS), h)


@every_stream
@pytest.mark.parametrize("pieces", [[1] * TIME, [2, 7], [5, 1, 3]], ids=str)
@torch.no_grad()
def test_pieces_give_what_the_whole_gives(options, pieces):
    stream, x, history = make_stream(options), normal(2, TIME, D), History()
    parts = [
        stream(piece, history=history, document_starts=starts)
        for piece, starts in zip(x.split(pieces, 1), STARTS.split(pieces, 1), strict=True)
    ]
    close(torch.cat(parts, 1), stream(x, document_starts=STARTS))


@every_stream
@torch.no_grad()
def test_the_last_document_goes_on(options):
    stream, x, history = make_stream(options), normal(2, TIME, D), History()
    stream(x[:, :5], history=history, document_starts=STARTS[:, :5])
    rest = stream(x[:, 5:], history=history)
    for sequence in range(2):  # in both, token 4 is the last one that starts a document
        close(rest[sequence], stream(x[sequence : sequence + 1, 4:])[0, 1:])


@torch.no_grad()
def test_a_raw_read_stays_within_its_document_too():
    read, state = Read(D, 2, compress="token").double(), normal(2, TIME, D, 2)
    randomise_(read)
    h, x = read(state, return_compressed=True, document_starts=STARTS)
    for sequence, tokens in documents(STARTS):
        own = state[sequence : sequence + 1, tokens]
        for got, wanted in zip((h, x), read(own, return_compressed=True), strict=True):
            close(got[sequence, tokens], wanted[0])


def test_what_does_not_fit_is_refused():
    x, state, h = normal(2, TIME, D), normal(2, TIME, D, 2), normal(2, TIME, D)
    stream = make_stream(STREAMS["token and conv"])
    residual = DeltaResidual(D, 2).double()
    for call in (
        lambda starts: stream(x, document_starts=starts),
        lambda starts: Expand(D, 2).double()(x, document_starts=starts),
        lambda starts: Read(D, 2, compress="channel").double()(state, document_starts=starts),
        lambda starts: residual(state, h, context=h, document_starts=starts),
    ):
        name = "^`document_starts` must "
        with pytest.raises(ValueError, match=rf"{name}have shape \(2, 9\), got \(2, 8\)$"):
            call(STARTS[:, 1:])
        with pytest.raises(TypeError, match=f"{name}have dtype torch.bool, got torch.int64$"):
            call(STARTS.long())
        with pytest.raises(ValueError, match=f"{name}be on cpu, got a tensor on meta$"):
            call(STARTS.to("meta"))
        with pytest.raises(TypeError, match=f"{name}be a torch.Tensor, got list$"):
            call(STARTS.tolist())
