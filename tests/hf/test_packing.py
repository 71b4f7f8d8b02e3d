"""Several documents in one sequence, as transformers' collators give them: none sees another."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import DataCollatorWithFlattening, Trainer, TrainingArguments

from ddl.hf import DDLCache, DDLForCausalLM, from_gpt
from tests.support.hf_cases import model, tokens
from tests.support.tolerances import assert_close

LENGTHS = (7, 1, 12, 4)
IDX = tokens(1, sum(LENGTHS))[0]
DOCUMENTS = IDX.split(LENGTHS)
POSITIONS = torch.cat([torch.arange(length) for length in LENGTHS])[None]
NUMBERS = torch.arange(4).repeat_interleave(torch.tensor(LENGTHS))[None]
WAYS: dict[str, dict[str, Any]] = {
    "positions": {},
    "numbers": {"return_position_ids": False, "return_seq_idx": True},
    "lengths": {"return_position_ids": False, "return_flash_attn_kwargs": True},
    "all": {"return_seq_idx": True, "return_flash_attn_kwargs": True},
}


def wrapped(residual: str = "ddl-tc") -> DDLForCausalLM:
    return from_gpt(model(residual=residual))


def flattened(**options: Any) -> dict[str, Any]:
    rows = [{"input_ids": document} for document in DOCUMENTS]
    return dict(DataCollatorWithFlattening(**options)(rows))


def alone(hf: DDLForCausalLM, documents: tuple[Tensor, ...] = DOCUMENTS) -> list[Tensor]:
    return [hf(document[None]).logits[0] for document in documents]


def scored(logits: list[Tensor], documents: tuple[Tensor, ...] = DOCUMENTS) -> Tensor:
    """The mean loss of all tokens but each document's first."""
    pairs = zip(logits, documents, strict=True)
    losses = [F.cross_entropy(row[:-1], own[1:], reduction="none") for row, own in pairs]
    return torch.cat(losses).mean()


@torch.no_grad()
def test_a_row_longer_than_the_context() -> None:
    """trl's packing joins the rows of a batch, each of which may have max_length tokens."""
    hf, rows = wrapped().double(), tokens(3, 24)
    positions = torch.arange(24).repeat(3)[None]  # 72 tokens for a block_size of 40
    packed = hf(rows.view(1, 72), position_ids=positions).logits.view(3, 24, -1)
    assert_close("logits", packed, hf(rows).logits, torch.float64, depth=4)


@pytest.mark.parametrize("first", [41, 72])
def test_a_document_longer_than_the_context(first: int) -> None:
    starts = torch.zeros(1, 72, dtype=torch.bool)
    starts[:, first:] = True
    sentence = f"documents of at most max_position_embeddings = 40 tokens, got one of {first}"
    with pytest.raises(ValueError, match=f"^`input_ids` must have {sentence}$"):
        wrapped()(tokens(1, 72), document_starts=starts)


@pytest.mark.parametrize("residual", ["ddl-tc", "hc"])
@pytest.mark.parametrize("way", WAYS)
def test_a_flattened_batch_is_each_document_alone(way: str, residual: str) -> None:
    hf = wrapped(residual).double()
    packed, separate = hf(**flattened(**WAYS[way])), alone(hf)
    assert_close("logits", packed.logits[0], torch.cat(separate), torch.float64, depth=4)
    torch.testing.assert_close(packed.loss, scored(separate).float())
    assert packed.loss != hf(IDX[None], labels=IDX[None]).loss
    names, parameters = zip(*hf.named_parameters(), strict=True)
    direction = torch.randn_like(packed.logits[0])
    found = torch.autograd.grad((packed.logits[0] * direction).sum(), parameters)
    expected = torch.autograd.grad((torch.cat(separate) * direction).sum(), parameters)
    for name, gradient, other in zip(names, found, expected, strict=True):
        torch.testing.assert_close(gradient, other, rtol=1e-8, atol=1e-9, msg=name)


@pytest.mark.parametrize(
    "given",
    [{"document_starts": POSITIONS == 0}, {"position_ids": POSITIONS}, {"seq_idx": NUMBERS}],
    ids=lambda given: next(iter(given)),
)
def test_labels_that_nobody_has_masked(given: dict[str, Tensor]) -> None:
    """No document is scored on the first token of the next, of which it knows nothing."""
    hf = wrapped()
    expected = scored(alone(hf))
    loss = hf(IDX[None], labels=IDX[None], **given).loss
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=0)
    shifted = F.pad(IDX[None, 1:], (0, 1), value=-100)
    loss = hf(IDX[None], labels=IDX[None], shift_labels=shifted, **given).loss
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=0)


def test_sequences_of_a_batch_have_documents_of_their_own() -> None:
    hf, rows = wrapped(), tokens(2, 12)
    positions = torch.stack((torch.arange(12), torch.arange(12) % 5))
    expected = hf(rows[:1]).logits[0], torch.cat(alone(hf, rows[1].split(5)))
    for given in (
        {"position_ids": positions},
        {"seq_idx": torch.stack((rows[0] * 0, positions[0] // 5))},
        {"cu_seq_lens_q": torch.tensor([0, 12, 17, 22, 24], dtype=torch.int32)},
    ):
        logits = hf(rows, **given).logits
        assert_close("logits", logits, torch.stack(expected), torch.float32, depth=4)
    assert torch.equal(hf(rows, position_ids=torch.arange(12)[None]).logits, hf(rows).logits)


@pytest.mark.parametrize("pads", [0, 1])
def test_positions_of_padding_mean_nothing(pads: int) -> None:
    """transformers numbers padding 0 or 1."""
    hf, rows = wrapped(), tokens(3, 10)
    mask = torch.tensor([[0] * 4 + [1] * 6, [1] * 7 + [0] * 3, [1, 1, 0, 1, 1, 0, 0, 1, 1, 1]])
    positions = (mask.cumsum(-1) - 1).masked_fill(mask == 0, pads)
    expected = hf(rows, attention_mask=mask).logits
    assert torch.equal(hf(rows, attention_mask=mask, position_ids=positions).logits, expected)
    positions[0, 7:] -= 3  # a second document, after three tokens
    logits = hf(rows, attention_mask=mask, position_ids=positions).logits
    both = alone(hf, (rows[0, 4:7], rows[0, 7:]))
    assert_close("padded", logits[0, 4:], torch.cat(both), torch.float32, depth=4)
    assert_close(
        "others", logits[1:][mask[1:] > 0], expected[1:][mask[1:] > 0], torch.float32, depth=4
    )


def test_a_document_may_begin_with_padding() -> None:
    hf, row = wrapped(), tokens(1, 8)
    mask = torch.tensor([[0, 1, 1, 1, 0, 0, 1, 1]])
    expected = torch.cat(alone(hf, (row[0, 1:4], row[0, 6:])))
    for given in (
        {"seq_idx": torch.tensor([[0, 0, 0, 0, 0, 1, 1, 1]])},
        {"cu_seq_lens_q": torch.tensor([0, 4, 8], dtype=torch.int32)},
        {"position_ids": torch.tensor([[0, 0, 1, 2, 0, 1, 0, 1]])},
    ):
        logits = hf(row, attention_mask=mask, **given).logits[mask > 0]
        assert_close(str(list(given)), logits, expected, torch.float32, depth=4)


def test_the_trainer_scores_each_document(tmp_path: Path) -> None:
    """It counts the labels itself, and drops columns whose names `forward` lacks."""
    hf = wrapped()
    arguments = TrainingArguments(
        str(tmp_path), per_device_eval_batch_size=4, use_cpu=True, report_to=[], disable_tqdm=True
    )
    rows = [{"input_ids": document, "labels": document} for document in DOCUMENTS]
    collator = DataCollatorWithFlattening(return_position_ids=False, return_flash_attn_kwargs=True)
    loss = Trainer(hf, arguments, data_collator=collator, eval_dataset=rows).evaluate()["eval_loss"]
    assert loss == pytest.approx(float(scored(alone(hf))), rel=1e-5)
    for name, column in (("position_ids", POSITIONS), ("seq_idx", NUMBERS)):
        labels = IDX.masked_fill(POSITIONS[0] == 0, -100)
        row = {"input_ids": IDX, "labels": labels, name: column[0]}
        again = Trainer(hf, arguments, eval_dataset=[row]).evaluate()["eval_loss"]
        assert again == pytest.approx(float(scored(alone(hf))), rel=1e-5)


@pytest.mark.parametrize("use_cache", [True, False])
def test_generate_continues_the_last_document(use_cache: bool) -> None:
    hf = wrapped()
    options = {"max_new_tokens": 5, "do_sample": False, "use_cache": use_cache, "pad_token_id": 0}
    expected = hf.generate(DOCUMENTS[-1][None], **options)[:, -5:]
    packed = hf.generate(IDX[None], position_ids=POSITIONS, **options)
    assert torch.equal(packed[:, -5:], expected)
    assert not torch.equal(hf.generate(IDX[None], **options)[:, -5:], expected)


def test_compiled() -> None:
    torch._dynamo.reset()
    hf = from_gpt(model(num_layers=1))
    compiled = torch.compile(hf, backend="eager", fullgraph=True)
    logits = compiled(input_ids=IDX[None], position_ids=POSITIONS, seq_idx=NUMBERS).logits[0]
    assert_close("logits", logits, torch.cat(alone(hf)), torch.float32, depth=4)


@torch.no_grad()
def held() -> DDLCache:
    return wrapped()(IDX[None, :4], use_cache=True).past_key_values


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (
            {"token_type_ids": IDX[None]},
            "`token_type_ids` must be left out, got one of type Tensor: the model has no such "
            "argument",
        ),
        (
            {"is_causal": False},
            "`is_causal` must be left out, got one of type bool: the model has no such argument",
        ),
        (
            {"position_ids": POSITIONS * 2},
            "`position_ids` must start at 0 in each document and go up by one, got 2 after 0",
        ),
        (
            {"position_ids": POSITIONS + 8},  # as the second process has of a shared sequence
            "`position_ids` must start at 0 in each document and go up by one, got 8 at the start",
        ),
        (
            {"position_ids": POSITIONS, "past_key_values": held()},
            "`position_ids`, `seq_idx` and `cu_seq_lens_q` must be left out if the cache holds "
            "tokens, got one: positions go on from these, and `document_starts` begins a document",
        ),
        (
            {"attention_mask": torch.zeros(1, 24).fill_(-torch.inf)},
            "`attention_mask` must have dtype bool or int64, with zeros for padding, got "
            "torch.float32",
        ),
    ],
)
@torch.no_grad()
def test_refusals(arguments: dict[str, Any], sentence: str) -> None:
    given = {"input_ids": IDX[None], **arguments}
    with pytest.raises((TypeError, ValueError), match=f"^{re.escape(sentence)}$"):
        wrapped()(**given)
