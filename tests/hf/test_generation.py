"""`generate` with DDLCache gives the same tokens as without a cache, for every residual."""

from __future__ import annotations

import copy
import re
from typing import Any

import pytest
import torch
from torch import Tensor

from ddl.hf import DDLCache, DDLForCausalLM, from_gpt
from ddl.hf.cache import CACHE
from tests.support.hf_cases import DEPTH, VARIANTS, model, nanogpt, padded, tokens
from tests.support.tolerances import assert_close

F32 = torch.float32

every_variant = pytest.mark.parametrize("options", VARIANTS.values(), ids=VARIANTS)
PROMPT = tokens(3, 7)


def wrapped(**options: Any) -> DDLForCausalLM:
    return from_gpt(model(**options))


def uncached(hf: DDLForCausalLM, ids: Tensor, number: int) -> Tensor:
    """The greedy continuation, computed from whole sequences."""
    for _ in range(number):
        ids = torch.cat((ids, hf(ids).logits[:, -1:].argmax(-1)), dim=1)
    return ids


@every_variant
def test_greedy(options: dict[str, Any]) -> None:
    hf = wrapped(**options)
    expected = uncached(hf, PROMPT, 12)
    assert len(set(expected[:, 7:].flatten().tolist())) > 8
    assert torch.equal(hf.generate(PROMPT, max_new_tokens=12), expected)
    assert torch.equal(hf.generate(PROMPT, max_new_tokens=12, use_cache=False), expected)
    by_gpt = model(**options).generate(PROMPT, 12, temperature=0)
    assert torch.equal(by_gpt, expected)


@every_variant
def test_beam_search(options: dict[str, Any]) -> None:
    hf = wrapped(**options)
    choice: dict[str, Any] = {"max_new_tokens": 9, "num_beams": 4, "num_return_sequences": 2}
    found = hf.generate(PROMPT, **choice)
    assert torch.equal(found, hf.generate(PROMPT, use_cache=False, **choice))
    assert not torch.equal(found[::2], hf.generate(PROMPT, max_new_tokens=9))


def test_sampling() -> None:
    hf = wrapped()
    choice: dict[str, Any] = {"max_new_tokens": 9, "do_sample": True, "top_k": 8}
    torch.manual_seed(5)
    first = hf.generate(PROMPT, **choice)
    torch.manual_seed(5)
    assert torch.equal(hf.generate(PROMPT, use_cache=False, **choice), first)
    assert not torch.equal(hf.generate(PROMPT, **choice), first)


@every_variant
def test_left_padding(options: dict[str, Any]) -> None:
    hf = wrapped(**options)
    lengths = [7, 1, 4]
    ids, mask = padded(PROMPT, lengths, "left")
    together = hf.generate(ids, attention_mask=mask, max_new_tokens=10)
    beams = hf.generate(ids, attention_mask=mask, max_new_tokens=5, num_beams=3)
    for row, length in enumerate(lengths):
        alone = PROMPT[row : row + 1, :length]
        assert torch.equal(together[row, 7:], uncached(hf, alone, 10)[0, length:])
        best = hf.generate(alone, max_new_tokens=5, num_beams=3)
        assert torch.equal(beams[row, 7:], best[0, length:])


@every_variant
def test_a_cache_is_given_back_and_goes_on(options: dict[str, Any]) -> None:
    hf = wrapped(**options)
    out = hf.generate(PROMPT, max_new_tokens=6, return_dict_in_generate=True)
    cache = out.past_key_values
    assert isinstance(cache, DDLCache)
    assert cache.get_seq_length() == 12  # the last token has not been read
    assert repr(cache) == "DDLCache(12 of 40 tokens)"
    more = torch.cat((out.sequences, tokens(3, 4, seed=8)), dim=1)
    expected = uncached(hf, more, 5)
    kept = copy.deepcopy(cache)
    assert torch.equal(hf.generate(more, past_key_values=cache, max_new_tokens=5), expected)
    assert (kept.get_seq_length(), cache.get_seq_length()) == (12, 21)
    assert torch.equal(hf.generate(more, past_key_values=kept, max_new_tokens=5), expected)


@every_variant
def test_passes_with_a_cache(options: dict[str, Any]) -> None:
    """A prompt passed in pieces has the logits of the whole prompt."""
    hf = wrapped(**options)
    ids, mask = padded(tokens(2, 20), [20, 13], "left")
    whole = hf(ids, attention_mask=mask).logits
    with torch.no_grad():
        out = hf(ids[:, :9], attention_mask=mask[:, :9], use_cache=True)
        for start, end in ((9, 10), (10, 15), (15, 20)):
            out = hf(
                ids[:, start:end],
                attention_mask=mask[:, :end],
                past_key_values=out.past_key_values,
                logits_to_keep=1,
            )
            torch.testing.assert_close(out.logits[:, -1], whole[:, end - 1], rtol=1e-4, atol=1e-5)
    assert hf(ids).past_key_values is None


@torch.no_grad()
def test_a_cache_has_two_names() -> None:
    """`past_key_values`, and what transformers calls it from 5.24 on."""
    hf = wrapped(residual="ddl-tc")
    whole = hf(PROMPT).logits[:, 4:]
    for name in ("past_key_values", "cache"):
        cache = hf(PROMPT[:, :4], use_cache=True)[CACHE]
        assert isinstance(cache, DDLCache)
        logits = hf(PROMPT[:, 4:], **{name: cache}).logits
        torch.testing.assert_close(logits, whole, rtol=1e-4, atol=1e-5)
        with pytest.raises(ValueError, match=f"^`{CACHE}` must be a ddl.hf.DDLCache, got dict: "):
            hf(PROMPT, **{name: {}})


@pytest.mark.parametrize("length", [7, 4])
def test_a_prompt_that_a_cache_has_seen_already(length: int) -> None:
    """No new token is left, and transformers would read the prompt a second time."""
    hf = wrapped(residual="ddl-tc")
    with torch.no_grad():
        cache = hf(PROMPT, use_cache=True).past_key_values
    sentence = f"`input_ids` must go on from the 7 tokens in `{CACHE}`, got {length}"
    with pytest.raises(ValueError, match=f"^{re.escape(sentence)}$"):
        hf.generate(PROMPT[:, :length], past_key_values=cache, max_new_tokens=3)


def test_from_embeddings_and_in_chunks() -> None:
    hf = wrapped(residual="ddl-tc")
    expected = uncached(hf, PROMPT, 6)
    chunked = hf.generate(PROMPT, max_new_tokens=6, prefill_chunk_size=2)
    assert torch.equal(chunked, expected)
    embedded = hf.generate(inputs_embeds=hf.model.wte(PROMPT), max_new_tokens=6)
    assert torch.equal(embedded, expected[:, 7:])


def test_records_of_a_generation() -> None:
    hf = wrapped()
    choice: dict[str, Any] = {"output_hidden_states": True, "output_logits": True}
    out = hf.generate(PROMPT, max_new_tokens=3, return_dict_in_generate=True, **choice)
    whole = hf(out.sequences[:, :-1], output_hidden_states=True)
    assert [len(states) for states in out.hidden_states] == [3, 3, 3]
    for number, states in enumerate(out.hidden_states):
        for state, reference in zip(states, whole.hidden_states, strict=True):
            assert_close("state", state[:, -1], reference[:, 6 + number], F32, depth=DEPTH)
        assert_close("logits", out.logits[number], whole.logits[:, 6 + number], F32, depth=DEPTH)


def test_up_to_block_size() -> None:
    hf = wrapped()
    full = hf.generate(PROMPT, max_new_tokens=33)
    assert torch.equal(full, uncached(hf, PROMPT, 33))
    sentence = (
        "`max_new_tokens` must keep prompt and new tokens within 41, the context and one more, "
        f"got {PROMPT.shape[1] + 35} in all"
    )
    for use_cache in (True, False):  # raised before the first token, not when the context is full
        with pytest.raises(ValueError, match=f"^{re.escape(sentence)}$"):
            hf.generate(PROMPT, max_new_tokens=35, use_cache=use_cache)


def test_a_model_without_attention_goes_on_beyond_it() -> None:
    """Whose states take the same memory after any number of tokens."""
    gpt = model(mixer="deltanet")
    hf = from_gpt(gpt)
    out = hf.generate(PROMPT, max_new_tokens=60)
    assert out.shape[1] == PROMPT.shape[1] + 60 > hf.config.block_size
    assert torch.equal(out, gpt.generate(PROMPT, 60, temperature=0))
    with pytest.raises(ValueError, match=r"^`max_new_tokens` must keep prompt and new tokens"):
        hf.generate(PROMPT, max_new_tokens=60, use_cache=False)


HOLDS = "a DDL model's own cache also holds what its convolutions and mixers have seen"
STATEFUL = "assisted generation is not supported with stateful models, such as DDLForCausalLM"


@pytest.mark.parametrize(
    ("choice", "sentence"),
    [
        (
            {"cache_implementation": kind},
            f"`cache_implementation` must be left out, got {kind!r}: {HOLDS}",
        )
        for kind in ("static", "offloaded", "quantized")
    ]
    + [
        ({"prompt_lookup_num_tokens": 3}, STATEFUL),
        ({"assistant_model": wrapped()}, STATEFUL),
        (
            {"output_attentions": True, "return_dict_in_generate": True},
            "`output_attentions` must be false, got True: attention weights are not returned",
        ),
    ],
)
def test_what_generation_refuses(choice: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(sentence)}$"):
        wrapped().generate(PROMPT[:1], max_new_tokens=3, **choice)


@pytest.mark.parametrize("kind", ["GPT", "nanoGPT"])
def test_continuous_batching_is_refused(kind: str) -> None:
    subject: Any = wrapped() if kind == "GPT" else from_gpt(nanogpt())
    with pytest.raises(ValueError, match=r"^`generate_batch` \(.* and this model does not take "):
        subject.generate_batch([[1, 2, 3]])


def test_with_gradients_there_is_no_cache() -> None:
    with pytest.raises(ValueError, match=r"^`cache` must be used under torch.no_grad\(\)"):
        wrapped()(PROMPT, use_cache=True)


# --- DDLCache -------------------------------------------------------------------------------------


def test_rows_of_a_cache() -> None:
    hf = wrapped(residual="ddl-tc")
    cache = DDLCache(hf.config.gpt)
    cache.reorder_cache(torch.tensor([0]))  # while it is empty
    cache.batch_repeat_interleave(2)
    assert (len(cache), cache.batch_size, cache.get_seq_length()) == (1, -1, 0)
    assert (cache.get_max_length(), cache.get_mask_sizes(3, 0)) == (40, (3, 0))
    assert not cache.is_compileable
    with torch.no_grad():
        hf(PROMPT, past_key_values=cache)
        cache.batch_select_indices(torch.tensor([2, 0]))
        cache.batch_repeat_interleave(2)
        assert cache.batch_size == 4
        rows = PROMPT[[2, 2, 0, 0]]
        new = tokens(4, 1, seed=3)
        logits = hf(new, past_key_values=cache).logits[:, -1]
    expected = hf(torch.cat((rows, new), dim=1)).logits[:, -1]
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-5)
    cache.reset()
    assert cache.get_seq_length() == 0


def test_what_a_cache_refuses() -> None:
    cache = DDLCache(wrapped().config.gpt)
    cache.crop(0)
    with pytest.raises(ValueError, match=r"^`tokens_to_remove` must be 0, got -2: a token that"):
        cache.crop(-2)
    with pytest.raises(TypeError, match=r"^a DDLLayer has no keys and values, got some"):
        cache.update(torch.zeros(1), torch.zeros(1), 0)
