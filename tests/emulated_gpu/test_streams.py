"""A stream that erases nothing, in pieces and of documents, emulated."""

from __future__ import annotations

import torch

from ddl.nn.history import History
from tests.nn.test_documents import STARTS
from tests.nn.test_stream_history import D, close, make_stream
from tests.support.emulated_device import emulated, needs_emulator
from tests.support.helpers import documents, normal

pytestmark = needs_emulator
OPTIONS = {"value_channels": 3, "erase": "none"}


@torch.no_grad()
def test_pieces_give_what_the_cpu_gives():
    stream, x, history = make_stream(OPTIONS), normal(2, 9, D), History()
    expected = stream(x)
    with emulated():
        pieces = [stream(piece, history=history) for piece in x.split([5, 1, 1, 2], 1)]
    close(torch.cat(pieces, 1), expected)


def test_documents_are_apart():
    stream, x = make_stream(OPTIONS), normal(2, 9, D).requires_grad_()
    leaves = [x, *stream.parameters()]
    alone = torch.cat([stream(x[i : i + 1, tokens])[0] for i, tokens in documents(STARTS)])
    expected = torch.autograd.grad(alone.sin().sum(), leaves)
    with emulated():
        packed = stream(x, document_starts=STARTS).flatten(0, 1)
        found = torch.autograd.grad(packed.sin().sum(), leaves)
    close(packed, alone)
    for gradient, wanted in zip(found, expected, strict=True):
        close(gradient, wanted)
