"""Perplexity, bits per byte, utilisation and memory, each against its formula."""

from __future__ import annotations

import math
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from ddl.lab import data
from ddl.lab.data import GPT2Tokenizer
from ddl.lab.train import Trainer, metrics, train
from ddl.lab.train.metrics import Metrics, operations_per_token, peak_operations
from ddl.models import GPT
from tests.lab.train.crash import curve
from tests.support.train_cases import quiet, recorder, short

CPU = torch.device("cpu")


def test_records_have_perplexity_bits_utilisation_and_memory(tmp_path: Path) -> None:
    run = train(short(tmp_path, "additive"), quiet()).run
    for record in run.metrics.read():
        kind = "validation_" if "validation_loss" in record else ""
        loss = record[f"{kind}loss"]
        assert record[f"{kind}perplexity"] == math.exp(loss)
        assert record[f"{kind}bits_per_byte"] == loss / math.log(2)  # a token is a byte
        if not kind:
            assert 0 < record["mfu"] < 1
            assert 50e6 < record["peak_memory"] < 100e9


def test_perplexity_is_that_of_the_papers_tables(tmp_path: Path) -> None:
    trainer = Trainer(short(tmp_path, "additive"), data.load("topics"), CPU)
    figures = Metrics(trainer).of_validation(2.85426)
    assert figures["perplexity"] == pytest.approx(17.3616, abs=1e-4)
    assert Metrics(trainer).of_validation(1e9)["perplexity"] < math.inf


def test_bits_per_byte_is_left_out_without_a_tokenizer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "tiktoken", None)
    config = short(tmp_path, "additive")
    corpus = replace(data.load("topics"), tokenizer=GPT2Tokenizer())
    config = replace(config, model=replace(config.model, vocab_size=50304))
    figures = Metrics(Trainer(config, corpus, CPU)).of_validation(1.0)
    assert figures == {"perplexity": math.e}


def test_operations_per_token_are_those_that_torch_counts(tmp_path: Path) -> None:
    config = replace(short(tmp_path, "additive").model, block_size=64, hidden_size=64)
    model = GPT(config)
    idx = torch.randint(256, (2, 64))
    # The fused attention of CPUs is not counted; products of matrices are.
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        loss = model(idx, labels=idx).loss
        assert loss is not None
        loss.backward()
    counted = counter.get_total_flops() / idx.numel()
    assert operations_per_token(config, model.num_parameters()) == pytest.approx(counted, rel=0.05)


def test_the_peak_is_that_of_the_data_sheet_or_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    assert 1e8 < peak_operations(CPU, "float32") < 1e14
    gpu = torch.device("cuda")
    for name, bfloat16, float32 in (
        ("NVIDIA H100 80GB HBM3", 989e12, 67e12),
        ("NVIDIA H100 PCIe", 756e12, 51e12),
        ("NVIDIA A100-SXM4-80GB", 312e12, 19.5e12),
        ("NVIDIA L40S", 362e12, 91.6e12),
        ("NVIDIA L4", 121e12, 30.3e12),
    ):
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda _, name=name: name)
        assert peak_operations(gpu, "bfloat16") == pytest.approx(bfloat16)
        assert peak_operations(gpu, "float32") == pytest.approx(float32)
    for name in ("Another GPU", "NVIDIA RTX A4000", "Tesla L400"):
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda _, name=name: name)
        assert peak_operations(gpu, "bfloat16") is None


def test_utilisation_is_the_share_of_the_peak(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metrics, "peak_operations", lambda *_: 1e12)
    trainer = Trainer(short(tmp_path, "additive"), data.load("topics"), CPU)
    operations = operations_per_token(trainer.config.model, trainer.model.num_parameters())
    figures = Metrics(trainer).of_speed(1000.0)
    assert figures["mfu"] == pytest.approx(1000 * operations / 1e12)
    monkeypatch.setattr(metrics, "peak_operations", lambda *_: None)
    assert "mfu" not in Metrics(trainer).of_speed(1000.0)


def test_recorded_gates_are_those_of_the_model(tmp_path: Path) -> None:
    """At first 1 everywhere; with other biases 2·sigmoid of each, as the weights are zero."""
    trainer = Trainer(short(tmp_path, "ddl-cc"), data.load("topics"), CPU)
    assert trainer.record().statistics("beta").mean.tolist() == pytest.approx([1.0] * 4)
    biases = [r.gate.bias for r in trainer.model.trunk.residuals]
    with torch.no_grad():
        for i, bias in enumerate(biases):
            bias.fill_(i - 1.0)
    expected = [2 * torch.sigmoid(bias).item() for bias in biases]
    assert trainer.record().statistics("beta").mean.tolist() == pytest.approx(expected, rel=1e-5)
    assert trainer.model.training
    additive = Trainer(short(tmp_path, "additive"), data.load("topics"), CPU)
    assert "beta" not in additive.record().quantities


@pytest.mark.parametrize("residual", ["additive", "ddl", "ddl-cc", "ddl-tc"])
def test_validation_records_have_the_mean_beta(tmp_path: Path, residual: str) -> None:
    records = train(short(tmp_path, residual), quiet()).run.metrics.read()
    values = [r["mean_beta"] for r in records if "mean_beta" in r]
    assert len(values) == (0 if residual == "additive" else 2)
    assert all(0.5 < value < 1.5 for value in values)


def test_samples_of_text_are_logged_and_change_nothing(tmp_path: Path) -> None:
    """They are records, they are printed, and training goes on as without them."""
    config = short(tmp_path, "additive", sample_every=2)
    run = train(config, console := recorder()).run
    samples = {r["step"]: r["sample"] for r in run.metrics.read() if "sample" in r}
    assert list(samples) == [2, 4, 6]
    corpus = data.load("topics")
    prompt = corpus.tokenizer.decode(corpus.validation[:16].tolist())
    assert all(text.startswith(prompt) for text in samples.values())
    assert len(set(samples.values())) == 3
    assert "step 4" in console.export_text()
    without = replace(config, out=tmp_path / "without", sample_every=None)
    rest = [r for r in curve(config) if "sample" not in r]
    train(without, quiet())
    assert rest == curve(without)
