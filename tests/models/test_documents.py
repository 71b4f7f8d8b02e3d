"""GPT on sequences that hold several documents: each gets the logits that it gets alone."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from ddl.hf import DDLCache, from_gpt
from ddl.models import GPT, Cache
from tests.models.test_cache import EVERY, model_of, tokens
from tests.support.helpers import documents

TIME = 12
STARTS = torch.zeros(3, TIME, dtype=torch.bool)
STARTS[0, [0, 1, 5]] = STARTS[1, 7] = True
every_residual = pytest.mark.parametrize("residual", EVERY)


def close(a: Tensor, b: Tensor) -> None:
    torch.testing.assert_close(a, b, rtol=0, atol=1e-11)


def alone(model: GPT, idx: Tensor, starts: Tensor = STARTS) -> Tensor:
    """Logits (B, T, vocabulary) of every document by itself."""
    logits = [model(idx[i : i + 1, own]).logits[0] for i, own in documents(starts)]
    return torch.cat(logits).unflatten(0, idx.shape)


@every_residual
def test_a_document_gets_the_logits_that_it_gets_alone(residual):
    model, idx = model_of(residual), tokens(3, TIME)
    close(model(idx, document_starts=STARTS).logits, alone(model, idx))
    assert not torch.allclose(model(idx).logits, alone(model, idx))


@every_residual
def test_the_loss_and_its_gradients_are_those_of_the_documents(residual):
    model, idx = model_of(residual).requires_grad_(), tokens(3, TIME)
    packed = model(idx, labels=idx, document_starts=STARTS).loss
    losses = []
    for sequence, own in documents(STARTS):
        logits = model(idx[sequence : sequence + 1, own]).logits[0, :-1]
        losses.append(F.cross_entropy(logits, idx[sequence, own][1:], reduction="none"))
    expected = torch.cat(losses).mean()
    close(packed, expected)
    parameters = list(model.parameters())
    found = torch.autograd.grad(packed, parameters)
    for gradient, wanted in zip(found, torch.autograd.grad(expected, parameters), strict=True):
        close(gradient, wanted)


@pytest.mark.table(1)
@every_residual
@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("pieces", [[1] * TIME, [5, 1, 6], [2, 10]], ids=str)
def test_pieces_give_what_the_whole_gives(residual, static, pieces):
    model, idx = model_of(residual, block_size=16), tokens(3, TIME)
    cache = Cache(model.config, static=static)
    parts = [
        model(piece, cache=cache, document_starts=starts).logits
        for piece, starts in zip(idx.split(pieces, 1), STARTS.split(pieces, 1), strict=True)
    ]
    close(torch.cat(parts, 1), model(idx, document_starts=STARTS).logits)


@pytest.mark.table(1)
@every_residual
@pytest.mark.parametrize("static", [False, True])
def test_the_last_document_goes_on(residual, static):
    """A prompt of several documents, then steps that know nothing of them."""
    model, idx = model_of(residual, block_size=16), tokens(3, TIME)
    cache = Cache(model.config, static=static)
    first = model(idx[:, :8], cache=cache, document_starts=STARTS[:, :8]).logits
    order = torch.tensor([1, 0, 2])
    cache.select(order)
    steps = [model(idx[order, t : t + 1], cache=cache).logits for t in range(8, TIME)]
    expected = alone(model, idx)
    close(first, expected[:, :8])
    close(torch.cat(steps, 1), expected[order, 8:])


@pytest.mark.table(1)
@every_residual
@pytest.mark.parametrize("static", [False, True])
def test_padding_before_documents(residual, static):
    model, idx = model_of(residual, block_size=16), tokens(3, TIME)
    keep = torch.ones(3, TIME, dtype=torch.bool)
    keep[0, :3] = keep[2, :4] = False
    starts = STARTS & keep
    cache = Cache(model.config, static=static)
    cached = model(
        idx[:, :9], attention_mask=keep[:, :9], cache=cache, document_starts=starts[:, :9]
    )
    mask = None if static else keep
    rest = model(idx[:, 9:], attention_mask=mask, cache=cache, document_starts=starts[:, 9:])
    whole = model(idx, attention_mask=keep, document_starts=starts).logits
    close(torch.cat((cached.logits, rest.logits), 1)[keep], whole[keep])
    for sequence, own in documents(starts):
        own = slice(max(own.start, int((~keep[sequence]).sum())), own.stop)
        if own.start < own.stop:
            close(whole[sequence, own], model(idx[sequence : sequence + 1, own]).logits[0])


@every_residual
def test_transformers(residual):
    model, idx = model_of(residual), tokens(3, TIME)
    ours, theirs = model, from_gpt(model)
    expected = ours(idx, labels=idx, document_starts=STARTS)
    actual = theirs(idx, labels=idx, document_starts=STARTS)
    close(actual.logits, expected.logits)
    torch.testing.assert_close(actual.loss.double(), expected.loss, rtol=1e-6, atol=0)
    cache = DDLCache(theirs.model._gpt_config)
    theirs(idx[:, :8], past_key_values=cache, document_starts=STARTS[:, :8])
    close(theirs(idx[:, 8:], past_key_values=cache).logits, expected.logits[:, 8:])


@pytest.mark.parametrize("use_cache", [True, False])
def test_transformers_continues_the_last_document(use_cache):
    model, idx = model_of("ddl-tc"), tokens(3, TIME)
    starts = STARTS.clone()
    starts[:, 6] = True
    theirs = from_gpt(model)

    def continued(prompt: Tensor, **more: Tensor) -> Tensor:
        options = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0} | more
        everything = torch.ones_like(prompt)  # or transformers takes token 0 for padding
        return theirs.generate(prompt, attention_mask=everything, use_cache=use_cache, **options)

    packed = continued(idx, document_starts=starts)[:, -5:]
    for row, prompt, begin in zip(packed, idx, (6, 7, 6), strict=True):
        assert torch.equal(row, continued(prompt[None, begin:])[0, -5:])


@pytest.mark.parametrize("length", [0, 5, 14])
def test_transformers_refuses_starts_of_another_length(length):
    theirs = from_gpt(model_of("ddl-tc"))
    starts = torch.zeros(3, length, dtype=torch.bool)
    prompt = tokens(3, TIME).clamp(min=1)
    expected = rf"^`document_starts` must have shape \(3, 12\), got \(3, {length}\)$"
    for given, sentence in ((starts, expected), (starts.tolist(), "torch.Tensor, got list$")):
        with pytest.raises((TypeError, ValueError), match=sentence):
            theirs.generate(prompt, document_starts=given, max_new_tokens=2, pad_token_id=0)


def test_transformers_does_not_score_first_tokens_of_shifted_labels_either():
    model, idx = model_of("ddl-cc"), tokens(3, TIME)
    theirs, shifted = from_gpt(model), F.pad(idx[:, 1:], (0, 1), value=-100)
    expected = theirs(idx, labels=idx, document_starts=STARTS).loss
    actual = theirs(idx, labels=idx, shift_labels=shifted, document_starts=STARTS).loss
    torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize("residual", ["additive", "ddl-tc"])
def test_exported_for_any_length(residual):
    model, idx = model_of(residual), tokens(3, TIME)
    length = torch.export.Dim("length", min=2, max=200)
    sizes = {"idx": {1: length}, "document_starts": {1: length}}
    given = {"document_starts": STARTS}
    program = torch.export.export(model, (idx,), given, dynamic_shapes=sizes).module()
    for short in (TIME, 5):
        starts = STARTS[:, :short]
        actual = program(idx[:, :short], document_starts=starts).logits
        close(actual, alone(model, idx[:, :short], starts))


@pytest.mark.exhaustive
def test_compiled():
    torch._dynamo.reset()
    model, idx = model_of("ddl-tc"), tokens(3, TIME)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    close(compiled(idx, document_starts=STARTS).logits, alone(model, idx))


def test_what_does_not_fit_is_refused():
    model, idx = model_of("ddl-tc"), tokens(3, TIME)
    for residual in ("ddl-tc", "additive"):
        model = model_of(residual)
        with pytest.raises(ValueError, match=r"^`document_starts` must have shape \(3, 12\), got"):
            model(idx, document_starts=STARTS[:, 1:])
        with pytest.raises(TypeError, match=r"^`document_starts` must have dtype torch.bool, got"):
            model(idx, document_starts=STARTS.long())
