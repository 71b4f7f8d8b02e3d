"""Training: repeatability, batches, run directories, Ctrl-C."""

from __future__ import annotations

import math
import os
import re
import signal
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from ddl.lab import data
from ddl.lab.cli.sample import sample
from ddl.lab.config import OptimConfig, SampleConfig, TrainConfig
from ddl.lab.train import Trainer, stop_on_signal, train
from ddl.lab.train.json_lines import JsonLines
from ddl.lab.train.runs import load_config, load_run
from ddl.lab.train.trainer import make_repeatable
from ddl.models import GPT
from tests.support.train_cases import quiet, recorder, short

CPU = torch.device("cpu")


def losses(config: TrainConfig) -> list[float]:
    records = train(replace(config, overwrite=True), quiet()).run.metrics.read()
    return [value for r in records for key, value in r.items() if key.endswith("loss")]


@pytest.mark.table(0)
@pytest.mark.parametrize("residual", ["additive", "ddl-cc", "ddl-tc"])
def test_same_seed_same_losses(tmp_path: Path, residual: str) -> None:
    config = short(tmp_path, residual)
    first = losses(config)
    assert len(first) == 5  # three training records and two evaluations
    assert losses(config) == first
    assert losses(replace(config, seed=2)) != first


def test_batches_depend_on_the_seed_and_not_on_the_residual(tmp_path: Path) -> None:
    first = []
    for residual, seed in (("additive", 1), ("ddl-cc", 1), ("ddl-cc", 2)):
        trainer = Trainer(short(tmp_path, residual, seed=seed), data.load("topics"), CPU)
        seen: list[torch.Tensor] = []
        trainer.model.register_forward_pre_hook(lambda _, args, seen=seen: seen.append(args[0]))
        trainer.step()
        trainer.step()
        first.append(torch.stack(seen))
    assert torch.equal(first[0], first[1])
    assert not torch.equal(first[1], first[2])
    assert not torch.equal(first[0][0], first[0][1])  # another step sees other windows


def test_evaluation_weighs_every_window_alike(tmp_path: Path) -> None:
    trainer = Trainer(short(tmp_path), data.load("topics"), CPU)
    batches = data.evaluation_batches(trainer.corpus.validation, 1, 32, 21)
    windows = torch.cat([batch.tokens for batch in batches])
    each = torch.stack([trainer.model(w[None], labels=w[None]).loss for w in windows])
    corpus = replace(trainer.corpus, validation=windows.flatten().numpy())
    trainer = Trainer(short(tmp_path, eval_batches=0), corpus, CPU)  # 8 + 8 + 5 windows
    assert trainer.evaluate() == pytest.approx(each.mean().item(), rel=1e-5)


def test_accumulation_equals_one_large_batch(tmp_path: Path) -> None:
    large = short(tmp_path, batch_size=6, accumulation=1)
    split = replace(large, batch_size=2, accumulation=3)
    steps = [Trainer(c, data.load("topics"), CPU).step() for c in (large, split)]
    assert steps[0].loss.item() == pytest.approx(steps[1].loss.item(), rel=1e-5)
    assert steps[0].grad_norm.item() == pytest.approx(steps[1].grad_norm.item(), rel=1e-4)


def test_clipping_bounds_the_gradient(tmp_path: Path) -> None:
    config = short(tmp_path, "additive")
    seen = []
    for clip in (0.0, 1e-3):
        trainer = Trainer(replace(config, optim=OptimConfig(clip=clip)), data.load("topics"), CPU)
        step_of_adam = trainer.optimizer.step

        def spy(step: object = step_of_adam, model: GPT = trainer.model) -> None:
            gradients = [p.grad for p in model.parameters()]
            seen.append(torch.nn.utils.get_total_norm(gradients).item())

        trainer.optimizer.step = spy
        assert trainer.step().grad_norm.item() > 0.1
    assert seen[0] > 0.1
    assert seen[1] == pytest.approx(1e-3, rel=1e-3)


def test_train_writes_a_run_that_samples(tmp_path: Path) -> None:
    config = short(tmp_path)
    run = train(config, quiet()).run
    names = {"config.json", "tokenizer.json", "metrics.jsonl", "checkpoints", "loss.png"}
    assert {file.name for file in run.path.iterdir()} == names
    assert (run.path / "loss.png").read_bytes().startswith(b"\x89PNG")
    records = run.metrics.read()
    assert [r["step"] for r in records] == [2, 3, 4, 6, 6]
    assert all(math.isfinite(v) for r in records for v in r.values())

    modes = {oct(file.stat().st_mode) for file in run.path.rglob("*") if file.is_file()}
    assert len(modes) == 1  # the weights are as readable as the rest
    assert load_config(run.path) == config
    model, _ = load_run(run.path, CPU)
    idx = torch.randint(256, (1, 20))
    assert torch.equal(model(idx).logits, load_run(run.path, CPU)[0](idx).logits)
    evaluator = Trainer(config, data.load("topics"), CPU)
    evaluator.model.load_state_dict(model.state_dict())
    assert evaluator.evaluate() == pytest.approx(records[-1]["validation_loss"], rel=1e-6)

    request = SampleConfig(run=run.path, prompt="The ", tokens=12, device="cpu")
    text = sample(request)
    assert text.startswith("The ")
    assert sample(request) == text
    assert sample(replace(request, seed=5)) != text


def test_ctrl_c_finishes_the_step_and_saves(tmp_path: Path) -> None:
    config = short(tmp_path, "additive", steps=1000, log_every=1, eval_every=1000)
    original = JsonLines.append

    def append(self: JsonLines, record: dict[str, float]) -> None:
        original(self, record)
        if record["step"] == 3:
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(JsonLines, "append", append)
        trained = train(config, console := recorder())
    run = trained.run
    assert trained.status == 128 + signal.SIGINT
    assert 3 <= len(run.metrics.read()) <= 5
    assert "Stopped after" in (text := console.export_text())
    assert re.search(r"mean loss \d\.\d{3}", text)
    load_run(run.path, CPU)
    with stop_on_signal() as stopped:
        assert not stopped()
        os.kill(os.getpid(), signal.SIGINT)
        assert stopped()
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)


@pytest.mark.parametrize("deterministic", [False, True])
def test_deterministic_algorithms_only_if_asked_for(
    deterministic: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Deterministic algorithms slow a GPU down, so they are optional; on a CPU nothing is set."""
    asked: list[torch.device] = []
    monkeypatch.setattr("ddl.lab.train.trainer.make_repeatable", asked.append)
    Trainer(short(tmp_path, "additive", deterministic=deterministic), data.load("topics"), CPU)
    assert asked == ([CPU] if deterministic else [])
    monkeypatch.undo()
    make_repeatable(CPU)
    assert not torch.are_deterministic_algorithms_enabled()


def test_a_gpu_made_repeatable(monkeypatch: pytest.MonkeyPatch) -> None:
    set_to: list[object] = []
    monkeypatch.setattr(
        torch, "use_deterministic_algorithms", lambda *args, **options: set_to.append(args)
    )
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    make_repeatable(torch.device("cuda"))
    assert set_to == [(True,)]
    assert not torch.utils.deterministic.fill_uninitialized_memory
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":16:8"  # the user's setting stays
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG")
    make_repeatable(torch.device("cuda"))
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
