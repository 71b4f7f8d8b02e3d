"""Perplexity, bits per byte, utilisation and memory, each against its formula."""

from __future__ import annotations

import json
import math
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from ddl.lab import data
from ddl.lab.data import GPT2Tokenizer
from ddl.lab.train import Trainer, metrics, train
from ddl.lab.train.clock import Clock
from ddl.lab.train.metrics import Metrics, peak_operations
from ddl.lab.train.runs import RunDirectory
from ddl.models import flops_per_token
from tests.lab.train.crash import curve
from tests.support.train_cases import quiet, recorder, short, stop_at

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


def test_records_have_the_cost_so_far(tmp_path: Path) -> None:
    """FLOPs by the formula, forward and backward; seconds of the steps alone, which only grow."""
    config = short(tmp_path, "ddl-cc", sample_every=3, record_every=3)
    records = train(config, quiet()).run.metrics.read()
    costs = [record for record in records if "sample" not in record]
    per_token = flops_per_token(config.model).total
    for record in costs:
        tokens = record["step"] * config.batch_size * config.accumulation * 32
        assert record["flops"] == pytest.approx(tokens * per_token, rel=1e-12)
    seconds = [record["seconds"] for record in costs]
    assert seconds == sorted(seconds)
    assert seconds[0] > 0


def test_the_clock_stands_still_in_what_is_no_training() -> None:
    clock = Clock(10.0)
    with clock.paused():
        before = clock.total
        time.sleep(0.05)
        assert clock.total == before
        assert 0 <= clock.lap() < 0.05
    assert 10 <= before <= clock.total < 10.05
    time.sleep(0.01)
    assert 0.01 <= clock.lap() < 0.05
    assert Clock(None).total is None


def test_seconds_go_on_where_a_run_was_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also between two records; a checkpoint of an earlier version has none, and none follow."""
    config = short(tmp_path, "additive", steps=8, log_every=4, eval_every=8, resume="auto")
    with monkeypatch.context() as patched:
        stop_at(6, patched)
        train(config, quiet())
    run = RunDirectory(config.directory)
    (manifest,) = run.path.glob("checkpoints/*/manifest.json")
    saved = json.loads(manifest.read_text())
    assert saved["seconds"] > run.metrics.read()[-1]["seconds"] > 0
    manifest.write_text(json.dumps(saved | {"seconds": 1000.0}))
    train(config, quiet())
    assert 1000 < run.metrics.read()[-1]["seconds"] < 1100


def test_without_the_seconds_before_none_are_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = short(tmp_path, "additive", resume="auto")
    with monkeypatch.context() as patched:
        stop_at(3, patched)
        train(config, quiet())
    run = RunDirectory(config.directory)
    (manifest,) = run.path.glob("checkpoints/*/manifest.json")
    saved = json.loads(manifest.read_text())
    del saved["seconds"]
    manifest.write_text(json.dumps(saved))
    train(config, quiet())
    later = [record for record in run.metrics.read() if record["step"] > 3]
    assert later
    assert all("seconds" not in record and record["flops"] > 0 for record in later)


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
    products = flops_per_token(trainer.config.model).matrix
    figures = Metrics(trainer).of_speed(1000.0)
    assert figures["mfu"] == pytest.approx(1000 * products / 1e12)
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
