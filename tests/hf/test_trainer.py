"""Hugging Face's Trainer trains our models, saves them, and resumes from a checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

from ddl.hf import DDLForCausalLM, from_gpt
from ddl.lab.config import RESIDUALS, OptimConfig
from ddl.models import GPT
from ddl.optim import make_optimizer
from tests.support.hf_cases import CHECKPOINTING, VOCABULARY, names, small
from tests.support.sampling import few

STEPS = 8


def rows() -> list[dict[str, Tensor]]:
    """Sequences that count upwards, which are easy to learn."""
    starts = torch.randint(VOCABULARY, (64, 1), generator=torch.Generator().manual_seed(2))
    sequences = (starts + torch.arange(24)) % VOCABULARY
    return [{"input_ids": row, "labels": row} for row in sequences]


def trainer(out: Path, hf: DDLForCausalLM, **options: Any) -> Trainer:
    arguments = TrainingArguments(
        output_dir=str(out),
        max_steps=STEPS,
        learning_rate=2e-2,
        lr_scheduler_type="constant",
        logging_steps=1,
        save_steps=4,
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        seed=3,
        **{"per_device_train_batch_size": 8, **options},
    )
    return Trainer(hf, arguments, train_dataset=rows(), eval_dataset=rows()[:16])


def fresh(residual: str = "ddl-cc", **options: Any) -> DDLForCausalLM:
    torch.manual_seed(1)
    return from_gpt(GPT(small(residual=residual, **options)))


def losses(done: Trainer) -> list[float]:
    return [record["loss"] for record in done.state.log_history if "loss" in record]


@pytest.mark.parametrize("residual", few(RESIDUALS, "hc", "ddl-cc"))
def test_it_learns_and_goes_on(residual: str, tmp_path: Path) -> None:
    hf = fresh(residual)
    run = trainer(tmp_path / "run", hf)
    before = run.evaluate()["eval_loss"]
    run.train()
    assert len(losses(run)) == STEPS
    assert run.evaluate()["eval_loss"] < before - 0.3
    assert names(tmp_path / "run") == ["checkpoint-4", "checkpoint-8"]

    other = fresh(residual)
    resumed = trainer(tmp_path / "run", other)
    resumed.train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-4"))
    for name, parameter in hf.named_parameters():
        assert torch.equal(other.get_parameter(name), parameter), name
    assert other.lm_head.weight is other.model.wte.weight

    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "checkpoint-8")
    idx = rows()[0]["input_ids"][None]
    assert torch.equal(loaded(idx).logits, hf.eval()(idx).logits)


def test_the_same_in_pieces(tmp_path: Path) -> None:
    """Gradient accumulation and activation checkpointing give the same steps."""
    plain, pieces = fresh(), fresh()
    trainer(tmp_path / "plain", plain).train()
    halves = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2}
    trainer(tmp_path / "pieces", pieces, **halves, **{CHECKPOINTING: True}).train()
    assert getattr(pieces, f"is_{CHECKPOINTING}")
    for name, parameter in plain.named_parameters():
        torch.testing.assert_close(
            pieces.get_parameter(name), parameter, rtol=2e-3, atol=2e-4, msg=name
        )


@pytest.mark.table(0)
@pytest.mark.parametrize("residual", ["ddl-cc", "ddl-tc"])
@pytest.mark.parametrize("recomputed", [False, True], ids=["stored", "recomputed"])
def test_states_that_are_not_stored_change_no_bit(
    residual: str, recomputed: bool, tmp_path: Path
) -> None:
    every, third = fresh(residual, anchor_every=1), fresh(residual, anchor_every=3)
    for hf in (every, third):
        trainer(tmp_path, hf, **{CHECKPOINTING: recomputed}).train()
    for name, parameter in every.named_parameters():
        assert torch.equal(third.get_parameter(name), parameter), name


def test_with_our_optimizer(tmp_path: Path) -> None:
    """Our optimizer decays neither gates nor compressors."""
    hf = fresh()
    optimizer = make_optimizer(hf, OptimConfig(lr=2e-2, weight_decay=0.1))
    run = trainer(tmp_path, hf)
    run.optimizer = optimizer
    run.train()
    assert losses(run)[-1] < losses(run)[0] - 0.3
    assert {id(p) for group in optimizer.param_groups for p in group["params"]} == {
        id(p) for p in hf.parameters()
    }
