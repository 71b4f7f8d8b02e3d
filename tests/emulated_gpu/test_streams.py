"""Streams that erase nothing, erase apart or have heads, in pieces and of documents, emulated."""

from __future__ import annotations

import pytest
import torch

from ddl.nn.history import History
from tests.nn.test_documents import STARTS
from tests.nn.test_stream_history import STREAMS, D, close, make_stream
from tests.support.emulated_device import emulated, needs_emulator
from tests.support.helpers import documents, normal

pytestmark = needs_emulator
NAMES = ["write-only", "apart", "heads", "heads, raw"]


def these(*often: str) -> pytest.MarkDecorator:
    """These streams, and with --all the others: each has kernels that are compiled for it."""
    rare = [pytest.param(n, marks=pytest.mark.exhaustive) for n in NAMES if n not in often]
    return pytest.mark.parametrize("name", [*often, *rare])


@these("apart", "heads")
@torch.no_grad()
def test_pieces_give_what_the_cpu_gives(name):
    stream, x, history = make_stream(STREAMS[name]), normal(2, 9, D), History()
    expected = stream(x)
    with emulated():
        pieces = [stream(piece, history=history) for piece in x.split([5, 1, 1, 2], 1)]
    close(torch.cat(pieces, 1), expected)


@these("write-only", "heads, raw")
def test_documents_are_apart(name):
    stream, x = make_stream(STREAMS[name]), normal(2, 9, D).requires_grad_()
    leaves = [x, *stream.parameters()]
    alone = torch.cat([stream(x[i : i + 1, tokens])[0] for i, tokens in documents(STARTS)])
    expected = torch.autograd.grad(alone.sin().sum(), leaves)
    with emulated():
        packed = stream(x, document_starts=STARTS).flatten(0, 1)
        found = torch.autograd.grad(packed.sin().sum(), leaves)
    close(packed, alone)
    for gradient, wanted in zip(found, expected, strict=True):
        close(gradient, wanted)
