"""The Trainer's `label_smoothing_factor`: position t is scored against token t + 1."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PromptTuningConfig, get_peft_model
from torch import Tensor
from transformers import Trainer, TrainingArguments, pipeline

from ddl.hf import DDLForCausalLM, from_gpt
from tests.support.hf_cases import model, tokens

IDX = tokens(3, 12)
LABELS = IDX.clone()
LABELS[0, :5] = -100
FACTOR = 0.3


class Renamed(DDLForCausalLM):
    """A class of a user's own, whose name says nothing."""


def plain() -> DDLForCausalLM:
    return from_gpt(model(residual="ddl-tc"))


def renamed() -> DDLForCausalLM:
    return Renamed(plain().config).eval()


def sharded() -> DDLForCausalLM:
    """Of a class as FSDP2 makes it from a model's."""
    hf = plain()
    hf.__class__ = type("FSDPDDLForCausalLM", (DDLForCausalLM,), {})
    return hf


def with_lora() -> Any:
    config = LoraConfig(target_modules=["c_q"], init_lora_weights=False, task_type="CAUSAL_LM")
    return get_peft_model(plain(), config).eval()


def smoothed(hf: Any, count: int | None = None) -> Tensor:
    """(1 − ε)·nll + ε·(mean of −log p over the vocabulary), of all scored tokens."""
    with torch.no_grad():
        log_p = hf(input_ids=IDX).logits[:, :-1].log_softmax(-1)
    targets = LABELS[:, 1:]
    scored = targets >= 0
    right = -log_p.gather(-1, targets.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    each = (1 - FACTOR) * right - FACTOR * log_p.mean(-1)
    return each[scored].sum() / (scored.sum() if count is None else count)


def trainer(out: Path, hf: Any) -> Trainer:
    arguments = TrainingArguments(
        str(out), label_smoothing_factor=FACTOR, use_cpu=True, report_to=[], disable_tqdm=True
    )
    rows = [{"input_ids": row, "labels": own} for row, own in zip(IDX, LABELS, strict=True)]
    return Trainer(hf, arguments, train_dataset=rows, eval_dataset=rows)


@pytest.mark.parametrize("make", [plain, renamed, sharded, with_lora])
@pytest.mark.parametrize("count", [None, 50])
def test_the_loss_is_the_formula(make: Any, count: int | None, tmp_path: Path) -> None:
    hf = make()
    run, given = trainer(tmp_path, hf), {"input_ids": IDX, "labels": LABELS}
    loss = run.compute_loss(hf, dict(given), num_items_in_batch=count)
    torch.testing.assert_close(loss.detach(), smoothed(hf, count))


def test_the_trainer_counts_and_averages(tmp_path: Path) -> None:
    hf = plain()
    run = trainer(tmp_path, hf)
    assert run.evaluate()["eval_loss"] == pytest.approx(float(smoothed(hf)), rel=1e-5)
    batch = {"input_ids": IDX, "labels": LABELS}
    assert int(run._get_num_items_in_batch([batch], torch.device("cpu"))) == int(
        (LABELS[:, 1:] >= 0).sum()
    )
    other = renamed()
    assert trainer(tmp_path, other)._loss_shifts_labels  # by the kind of loss, not by the name


def test_a_pipeline_knows_the_model(caplog: pytest.LogCaptureFixture) -> None:
    from ddl.hf import to_fast
    from ddl.models.tokenizers import ByteTokenizer

    hf = from_gpt(model(vocab_size=256))
    pipeline("text-generation", model=hf, tokenizer=to_fast(ByteTokenizer(), hf.config.gpt))
    assert "not supported" not in caplog.text


def test_prompts_have_no_smoothed_loss(tmp_path: Path) -> None:
    """transformers smooths without the virtual tokens: an error, not the loss of other tokens."""
    hf = get_peft_model(plain(), PromptTuningConfig(num_virtual_tokens=2, task_type="CAUSAL_LM"))
    with pytest.raises(RuntimeError, match=r"tensor a \(14\) must match .* tensor b \(12\)"):
        trainer(tmp_path, hf).compute_loss(hf, {"input_ids": IDX, "labels": LABELS})
