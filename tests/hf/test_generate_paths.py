"""`generate` takes whatever transformers hands on, by every path that it has."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    LogitsProcessorList,
    MaxLengthCriteria,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    StoppingCriteriaList,
    TemperatureLogitsWarper,
    TextIteratorStreamer,
    WatermarkingConfig,
    pipeline,
)

from ddl.hf import convert, from_gpt, to_fast
from ddl.models.tokenizers import ByteTokenizer
from tests.support.decoder_cases import plain
from tests.support.hf_cases import model, nanogpt, small

TOKENIZER = to_fast(ByteTokenizer(), small(vocab_size=300))
PROMPTS = TOKENIZER(["ab", "b"], return_tensors="pt", padding=True)
NUMBER = 5


KINDS: dict[str, Callable[[], PreTrainedModel]] = {
    "GPT": lambda: from_gpt(model(residual="ddl-tc", vocab_size=300)),
    "nanoGPT": lambda: from_gpt(nanogpt(vocab_size=300)),
    "Llama": lambda: convert(plain(vocab_size=300).eval(), value_channels=2, compress="token"),
}


def continued(hf: Any, ids: Tensor, **kwargs: Any) -> Tensor:
    """A decoding method of a user's own, given as `custom_generate`."""
    out = hf(**hf.prepare_inputs_for_generation(ids, **kwargs))
    return torch.cat((ids, out.logits[:, -1:].argmax(-1)), dim=1)


# --- the paths of `generate` ----------------------------------------------------------------------

PATHS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampling": {"do_sample": True, "top_k": 8, "min_p": 0.01, "typical_p": 0.9},
    "beams": {"num_beams": 3, "num_return_sequences": 2, "length_penalty": 0.5},
    "sampled beams": {"num_beams": 3, "do_sample": True},
    "stop strings": {"stop_strings": ["e"], "tokenizer": TOKENIZER},
    "stop strings of beams": {"stop_strings": ["e"], "tokenizer": TOKENIZER, "num_beams": 2},
    "healed tokens": {"token_healing": True, "tokenizer": TOKENIZER},
    "guidance": {"guidance_scale": 1.5, "negative_prompt_ids": PROMPTS.input_ids},
    "watermark": {"watermarking_config": WatermarkingConfig(bias=2.0)},
    "prompt in chunks": {"prefill_chunk_size": 1},
    "no cache": {"use_cache": False},
    "allowed tokens": {"prefix_allowed_tokens_fn": lambda _, __: [97, 98, 99]},
    "criteria": {"stopping_criteria": StoppingCriteriaList([MaxLengthCriteria(6)])},
    "processors": {"logits_processor": LogitsProcessorList([TemperatureLogitsWarper(0.5)])},
    "records": {"return_dict_in_generate": True, "output_scores": True, "output_logits": True},
    "a method of one's own": {"custom_generate": continued},
}


CASES = [(kind, path) for kind in KINDS for path in PATHS]
CASES.remove(("nanoGPT", "prompt in chunks"))  # transformers: chunks need a cache


@pytest.mark.parametrize(("kind", "path"), CASES)
def test_it_is_taken(kind: str, path: str) -> None:
    torch.manual_seed(0)
    options = {"max_new_tokens": NUMBER, "pad_token_id": TOKENIZER.pad_token_id, **PATHS[path]}
    found: Any = KINDS[kind]().generate(**PROMPTS, **options)
    found = found.sequences if path == "records" else found
    most = PROMPTS.input_ids.shape[1] + (1 if path == "a method of one's own" else NUMBER)
    assert found.shape[0] == 2 * options.get("num_return_sequences", 1)
    assert PROMPTS.input_ids.shape[1] < found.shape[1] <= most


@pytest.mark.parametrize("kind", KINDS)
def test_a_stop_string_ends_it(kind: str) -> None:
    hf: Any = KINDS[kind]()
    (tokens,) = hf.generate(PROMPTS.input_ids[:1], max_new_tokens=12).tolist()
    end = TOKENIZER.decode(tokens[5:6])
    stopped = hf.generate(
        PROMPTS.input_ids[:1], max_new_tokens=12, stop_strings=[end], tokenizer=TOKENIZER
    )
    assert (
        stopped[0].tolist() == tokens[: 1 + min(i for i in range(2, 14) if tokens[i] == tokens[5])]
    )


@pytest.mark.parametrize("kind", KINDS)
def test_a_streamer_gets_the_text(kind: str) -> None:
    streamer = TextIteratorStreamer(TOKENIZER, skip_prompt=True)
    hf: Any = KINDS[kind]()
    out = hf.generate(PROMPTS.input_ids[:1], max_new_tokens=NUMBER, streamer=streamer)
    assert "".join(streamer) == TOKENIZER.decode(out[0, 2:])


@pytest.mark.parametrize("kind", KINDS)
def test_a_pipeline_with_a_stop_sequence_and_beams(kind: str) -> None:
    tokenizer: PreTrainedTokenizerFast = TOKENIZER
    write: Any = pipeline("text-generation", model=KINDS[kind](), tokenizer=tokenizer)
    (one,) = write("ab", max_new_tokens=NUMBER, stop_sequence="e")
    assert one["generated_text"].startswith("ab")
    two = write(["ab", "b"], batch_size=2, num_beams=2, max_new_tokens=NUMBER)
    assert [part[0]["generated_text"][:1] for part in two] == ["a", "b"]


@pytest.mark.parametrize("kind", KINDS)
def test_a_misspelt_name_is_refused(kind: str) -> None:
    hf: Any = KINDS[kind]()
    with pytest.raises(ValueError, match=r"not used by the model: \['document_start'\]"):
        hf.generate(**PROMPTS, max_new_tokens=NUMBER, document_start=PROMPTS.attention_mask)
