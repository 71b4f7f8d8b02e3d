"""trl's trainers and Liger's losses train our models as they train a Llama."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM, PreTrainedModel

from ddl.hf import convert, from_gpt, to_fast
from ddl.models.tokenizers import ByteTokenizer
from tests.support.decoder_cases import plain
from tests.support.hf_cases import model, nanogpt, small

trl = pytest.importorskip("trl", reason="trl is not installed")
datasets = pytest.importorskip("datasets", reason="datasets is not installed")

TOKENIZER = to_fast(ByteTokenizer(), small(vocab_size=300))
COMMON: dict[str, Any] = {
    "max_steps": 2,
    "per_device_train_batch_size": 2,
    "learning_rate": 1e-3,
    "report_to": [],
    "use_cpu": True,
    "bf16": False,
    "logging_steps": 1,
    "save_strategy": "no",
    "disable_tqdm": True,
}
TEXTS = {"text": ["ab cd", "x y z", "hello", "more"]}
PAIRS = {"prompt": ["ab", "x"], "chosen": [" cd", " y"], "rejected": [" zz", " qq"]}
PROMPTS = {"prompt": ["ab", "x", "yy", "zz"]}


def a_llama() -> PreTrainedModel:
    llama: PreTrainedModel = convert(plain(vocab_size=300), value_channels=2, compress="token")
    return llama


KINDS: dict[str, Callable[[], PreTrainedModel]] = {
    "GPT": lambda: from_gpt(model(residual="ddl-tc", vocab_size=300)),
    "nanoGPT": lambda: from_gpt(nanogpt(vocab_size=300)),
    "Llama": a_llama,
}
every_kind = pytest.mark.parametrize("kind", KINDS)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], PreTrainedModel]:
    """Load a model from a directory, where trl looks for its reference, too."""
    folder = tmp_path_factory.mktemp("saved")

    def load(kind: str) -> PreTrainedModel:
        if not (folder / kind).exists():
            torch.manual_seed(0)
            KINDS[kind]().save_pretrained(folder / kind)
        auto: Any = AutoModelForCausalLM
        return auto.from_pretrained(folder / kind)

    return load


def trained(trainer: str, hf: PreTrainedModel, data: Any, out: Path, **options: Any) -> list[Any]:
    """Train two steps; return what was logged of each."""
    extra = {name: options.pop(name) for name in ("reward_funcs",) if name in options}
    arguments = getattr(trl, f"{trainer}Config")(out, **COMMON, **options)
    before = {name: parameter.clone() for name, parameter in hf.named_parameters()}
    run = getattr(trl, f"{trainer}Trainer")(
        hf,
        args=arguments,
        train_dataset=datasets.Dataset.from_dict(data),
        processing_class=TOKENIZER,
        **extra,
    )
    run.train()
    same = [name for name, p in hf.named_parameters() if torch.equal(p.cpu(), before[name])]
    assert len(same) < len(before) / 2
    return [entry for entry in run.state.log_history if "loss" in entry]


@every_kind
@pytest.mark.parametrize("loss_type", ["nll", "chunked_nll"])
def test_sft(kind: str, loss_type: str, saved: Any, tmp_path: Path) -> None:
    hf = saved(kind)
    rows = [[*TOKENIZER(text).input_ids, TOKENIZER.eos_token_id] for text in TEXTS["text"]]
    losses = []
    with torch.no_grad():
        for row in rows:
            logits = hf(torch.tensor([row])).logits[0, :-1]
            losses.append(F.cross_entropy(logits, torch.tensor(row[1:]), reduction="sum").item())
    logged = trained("SFT", hf, TEXTS, tmp_path, max_length=20, loss_type=loss_type, seed=3)
    means = [
        (losses[i] + losses[j]) / (len(rows[i]) + len(rows[j]) - 2)
        for i in range(4)
        for j in range(i)
    ]
    assert min(abs(logged[0]["loss"] - mean) for mean in means) < 1e-4


@pytest.mark.parametrize("kind", ["GPT", "Llama"])
def test_packed_sft(kind: str, saved: Any, tmp_path: Path) -> None:
    """Documents of a pack do not see one another, so the loss is that of padded sequences."""
    padded = trained("SFT", saved(kind), TEXTS, tmp_path, max_length=20)
    packed = trained("SFT", saved(kind), TEXTS, tmp_path, max_length=None, padding_free=True)
    assert packed[0]["loss"] == pytest.approx(padded[0]["loss"], abs=1e-4)


@every_kind
def test_dpo(kind: str, saved: Any, tmp_path: Path) -> None:
    """The first step's model is its own reference, so its loss is that of a coin."""
    logged = trained("DPO", saved(kind), PAIRS, tmp_path, max_length=20)
    assert logged[0]["loss"] == pytest.approx(math.log(2), abs=1e-4)
    assert logged[0]["grad_norm"] > 0


@pytest.mark.parametrize("kind", ["GPT", "nanoGPT"])
def test_dpo_by_ligers_chunked_loss(kind: str, saved: Any, tmp_path: Path) -> None:
    pytest.importorskip("liger_kernel", reason="liger-kernel is not installed")
    logged = trained("DPO", saved(kind), PAIRS, tmp_path, max_length=20, use_liger_kernel=True)
    assert logged[0]["loss"] == pytest.approx(math.log(2), abs=1e-4)
    assert logged[0]["grad_norm"] > 0


@every_kind
def test_grpo(kind: str, saved: Any, tmp_path: Path) -> None:
    logged = trained(
        "GRPO",
        saved(kind),
        PROMPTS,
        tmp_path,
        num_generations=2,
        max_completion_length=6,
        beta=0.1,
        reward_funcs=lambda completions, **_: [float(sum(map(ord, c))) for c in completions],
    )
    assert logged[0]["grad_norm"] > 0
    assert logged[0]["kl"] == pytest.approx(0, abs=1e-5)
