"""Converted decoders generate with every cache what they predict without one."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from transformers import DynamicCache, GenerationConfig, StaticCache

from ddl import hf
from ddl.hf.cache import CACHE, HistoryLayer
from tests.support.decoder_cases import VARIANTS, converted, plain, tokens
from tests.support.sampling import few

LONG: dict[str, Any] = {"do_sample": False, "pad_token_id": 0, "eos_token_id": None}
NEW = 7
LOOK_BACK = ("token and conv", "convolved gate", "adapter", "annealed")
every_variant = pytest.mark.parametrize("variant", VARIANTS)
families = pytest.mark.parametrize("family", few(["Llama", "Mistral", "GPT2", "Qwen3"], "Mistral"))
some = pytest.mark.parametrize("variant", ["channel", *LOOK_BACK])


@torch.no_grad()
@every_variant
@pytest.mark.parametrize("kind", ["dynamic", "dynamic without layers", "static"])
def test_tokens_come_one_by_one_as_all_at_once(variant, kind):
    """In pieces of four, one, two and one tokens."""
    model, idx = converted(variant), tokens(2, 8)
    cache: Any = StaticCache(config=model.config, max_cache_len=12)
    if kind != "static":
        cache = DynamicCache() if "without" in kind else DynamicCache(config=model.config)
    pieces = [
        model(piece, past_key_values=cache, use_cache=True).logits
        for piece in idx.split([4, 1, 2, 1], 1)
    ]
    torch.testing.assert_close(torch.cat(pieces, 1), model(idx).logits, rtol=1e-5, atol=1e-5)
    kept = [layer for layer in cache.layers if isinstance(layer, HistoryLayer)]
    assert len(kept) == (variant in LOOK_BACK)
    assert cache.get_seq_length() == 8
    cache.reset()
    again = model(idx, past_key_values=cache, use_cache=True).logits
    torch.testing.assert_close(again, model(idx).logits, rtol=1e-5, atol=1e-5)


@families
@some
@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_generation_with_beams_and_with_padding(family, variant, cache):
    model, idx = converted(variant, family), tokens(2, 8)
    options = {**LONG, "max_new_tokens": NEW}
    kind = {"cache_implementation": "static", "disable_compile": True} if cache == "static" else {}
    expected = model.generate(idx, use_cache=False, **options)
    assert torch.equal(model.generate(idx, **kind, **options), expected)
    beams = {**options, "num_beams": 3}
    assert torch.equal(
        model.generate(idx, **kind, **beams), model.generate(idx, use_cache=False, **beams)
    )
    padded = torch.cat((torch.zeros(1, 3, dtype=torch.int64), idx[:1, 3:]), 1)
    mask = (padded != 0).long()
    both, masks = torch.cat((padded, idx[1:])), torch.cat((mask, torch.ones_like(mask)))
    found = model.generate(both, attention_mask=masks, **kind, **options)
    assert torch.equal(found[:1, 3:], model.generate(idx[:1, 3:], **options))
    assert torch.equal(found[1:], expected[1:])


@families
@some
def test_assisted_decoding_takes_back_what_it_guessed_wrongly(family, variant):
    model, idx = converted(variant, family), tokens(1, 8)
    options = {**LONG, "max_new_tokens": 12}
    expected = model.generate(idx, **options)
    assert torch.equal(model.generate(idx, prompt_lookup_num_tokens=3, **options), expected)
    other = hf.convert(plain(family), **VARIANTS[variant])  # guesses otherwise
    assert torch.equal(model.generate(idx, assistant_model=other, **options), expected)
    assert torch.equal(model.generate(idx, assistant_model=plain(family), **options), expected)


@some
@pytest.mark.parametrize("given", ["embeddings", "all layers sliding"])
def test_other_inputs_and_other_layers(variant, given):
    sliding = {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 0}
    model = converted(variant, "Qwen2", **(sliding if given != "embeddings" else {}))
    idx, options = tokens(2, 8), {**LONG, "max_new_tokens": NEW}
    expected = model.generate(idx, use_cache=False, **options)
    if given == "embeddings":
        found = model.generate(inputs_embeds=model.get_input_embeddings()(idx), **options)
        assert torch.equal(found, expected[:, 8:])
    else:
        assert torch.equal(model.generate(idx, **options), expected)


@torch.no_grad()
@some
def test_a_mask_may_be_as_long_as_a_static_cache(variant):
    model, idx = converted(variant), tokens(2, 8)
    mask = torch.zeros(2, 16, dtype=torch.int64)
    mask[:, :8] = 1
    mask[0, :2] = 0
    cache = StaticCache(config=model.config, max_cache_len=16)
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    found = [
        model(
            idx[:, part], attention_mask=mask, position_ids=positions[:, part],
            past_key_values=cache, use_cache=True,
        ).logits
        for part in (slice(0, 5), slice(5, 8))
    ]  # fmt: skip
    expected = model(idx, attention_mask=mask[:, :8], position_ids=positions[:, :8]).logits
    found = torch.cat(found, 1)
    torch.testing.assert_close(found[0, 2:], expected[0, 2:])
    torch.testing.assert_close(found[1], expected[1])
    if variant in LOOK_BACK:
        with pytest.raises(ValueError, match=r"^`attention_mask` must have a column for each tok"):
            model(idx, attention_mask=mask[:, :7])


@torch.no_grad()
@some
def test_a_cache_goes_on_for_several_sequences_after_a_crop(variant):
    model, idx = converted(variant), tokens(1, 8)
    cache = DynamicCache(config=model.config)
    model(idx[:, :2], past_key_values=cache, use_cache=True)
    cache.activate_past_recording()
    if variant in LOOK_BACK:
        with pytest.raises(ValueError, match=r"^`tokens` must be at most 0, got 1$"):
            cache.layers[-1].crop(-1)  # nothing has been recorded yet
    model(idx[:, 2:7], past_key_values=cache, use_cache=True)
    cache.crop(-3)
    cache.batch_repeat_interleave(3)
    found = model(idx[:, 4:].expand(3, -1), past_key_values=cache, use_cache=True).logits
    torch.testing.assert_close(found, model(idx).logits[:, 4:].expand(3, -1, -1))
    cache.batch_select_indices(torch.tensor([2, 0]))
    last = tokens(2, 1, seed=5)
    found = model(last, past_key_values=cache, use_cache=True).logits[:, 0]
    expected = model(torch.cat((idx.expand(2, -1), last), 1)).logits[:, -1]
    torch.testing.assert_close(found, expected)
    cache.crop(-5)  # over the place of the crop before, up to where recording began
    if variant in LOOK_BACK:
        with pytest.raises(ValueError, match=r"^`tokens` must be at most 0, got 3$"):
            cache.layers[-1].crop(-3)


@torch.no_grad()
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("family", ["Llama", "GPT2"])  # with biases padding would write something
@some
def test_padding_leaves_no_trace(variant, family, side):
    model, idx = converted(variant, family), tokens(2, 8)
    mask = torch.ones(2, 8, dtype=torch.int64)
    at = slice(0, 3) if side == "left" else slice(5, 8)
    mask[0, at] = 0
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    found = model(idx, attention_mask=mask, position_ids=positions).logits
    alone = model(idx[:1, mask[0].bool()]).logits
    torch.testing.assert_close(found[:1, mask[0].bool()], alone)
    torch.testing.assert_close(found[1:], model(idx[1:]).logits)


@torch.no_grad()
@some
def test_packed_documents_do_not_see_one_another(variant):
    model, idx = converted(variant), tokens(1, 9)
    positions = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4]])
    found = model(idx, position_ids=positions, use_cache=False).logits
    apart = [model(part).logits for part in idx.split([4, 5], 1)]
    torch.testing.assert_close(found, torch.cat(apart, 1))


def test_what_a_history_needs_is_asked_for():
    model, idx = converted("token and conv"), tokens(2, 4)
    cache = DynamicCache(config=model.config)
    model(idx, past_key_values=cache, use_cache=True)  # with gradients, as in training
    with pytest.raises(ValueError, match=rf"^`{CACHE}` must be used under torch.no_grad"):
        model(idx, past_key_values=cache, use_cache=True)
    with torch.no_grad():
        with pytest.raises(ValueError, match=rf"^`{CACHE}` must have been filled by a conv"):
            model(idx, past_key_values=cache, use_cache=True)
        whole = torch.ones(2, 1, 4, 4, dtype=torch.bool).tril()
        with pytest.raises(ValueError, match=r"^`attention_mask` must be \(batch, tokens so far\)"):
            model(idx, attention_mask=whole)
        with pytest.raises(ValueError, match=r"^`output_hidden_states` must be false with a cach"):
            model(idx, use_cache=True, past_key_values=DynamicCache(), output_hidden_states=True)
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(idx, past_key_values=cache, use_cache=True)
        with pytest.raises(ValueError, match=r"^`history` must be used in one dtype, got torch.fl"):
            copy.deepcopy(model).double()(idx, past_key_values=cache, use_cache=True)
    cache = DynamicCache(config=model.config)
    cache.offloading = True
    with torch.no_grad(), pytest.raises(ValueError, match=rf"^`{CACHE}` must not be offloaded"):
        model(idx, past_key_values=cache, use_cache=True)
    with pytest.raises(TypeError, match=r"^a HistoryLayer has no keys"):
        HistoryLayer().update(idx, idx)


@pytest.mark.parametrize(
    "variant", [pytest.param("channel", marks=pytest.mark.exhaustive), *LOOK_BACK]
)
def test_continuous_batching(variant):
    """transformers' own for reads of one token; else it would log errors and return no tokens."""
    model, idx = converted(variant), tokens(2, 8)
    config = GenerationConfig(max_new_tokens=3, do_sample=False, eos_token_id=-1, pad_token_id=0)
    if variant in LOOK_BACK:
        sentence = r"^`generate_batch` \(.* reads of several tokens need the past of the stream"
        with pytest.raises(ValueError, match=sentence):
            model.generate_batch(idx.tolist(), generation_config=config)
        with pytest.raises(ValueError, match=sentence):
            model.generate(idx, cache_implementation="paged", max_new_tokens=3)
        return
    found = model.generate_batch(idx.tolist(), generation_config=config)
    expected = model.generate(idx, **LONG, max_new_tokens=3)[:, 8:]
    assert [each.generated_tokens for each in found.values()] == expected.tolist()
