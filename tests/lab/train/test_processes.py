"""Training in several processes does what one process does."""

from __future__ import annotations

import json
import string
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.tensor import DTensor

from ddl.lab import data
from ddl.lab.config import BASELINES, RESIDUALS, PrepareConfig, TrainConfig
from ddl.lab.data.prepare import prepare
from ddl.lab.load import load
from ddl.lab.train import Trainer, train
from ddl.lab.train.processes import Processes, joined
from ddl.lab.train.runs import RunDirectory
from tests.support.processes import together, training
from tests.support.train_cases import quiet, short

CPU = torch.device("cpu")
HOW = ("ddp", "fsdp2")


def config(folder: Path, residual: str = "ddl-tc", **changes: Any) -> TrainConfig:
    return short(folder, residual, precision="float32", batch_size=4, accumulation=2, **changes)


def losses(config: TrainConfig) -> dict[tuple[int, str], float]:
    """Training and validation losses, by step and kind."""
    return {
        (record["step"], kind): record[kind]
        for record in RunDirectory(config.directory).metrics.read()
        for kind in ("loss", "validation_loss", "grad_norm")
        if kind in record
    }


def check_losses(found: TrainConfig, expected: TrainConfig, tolerance: float = 1e-5) -> None:
    assert losses(found).keys() == losses(expected).keys()
    assert losses(found) == pytest.approx(losses(expected), rel=tolerance)


def gradients(config: TrainConfig, processes: Processes) -> dict[str, torch.Tensor]:
    """The gradients of the first step, in float64, as they come to the optimizer."""
    torch.set_default_dtype(torch.float64)
    try:
        trainer = Trainer(config, data.load(config.data), CPU, processes)
        trainer.optimizer.step = lambda: None  # type: ignore[method-assign]
        trainer.optimizer.zero_grad = lambda **_: None  # type: ignore[method-assign]
        trainer.step()
        named = dict(trainer.model.named_parameters())
    finally:
        torch.set_default_dtype(torch.float32)
    return {name: whole(parameter.grad) for name, parameter in named.items()}


def whole(tensor: torch.Tensor | None) -> torch.Tensor:
    assert tensor is not None
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def save_gradients(config: TrainConfig, folder: Path) -> Any:
    def act(rank: int) -> None:
        with joined(1) as processes:
            torch.save(gradients(config, processes), folder / f"{rank}.pt")

    return act


def check_gradients(config: TrainConfig, count: int, folder: Path) -> None:
    """All processes have the gradients of one process with the whole batch."""
    together(count, folder, save_gradients(config, folder))
    expected = gradients(config, Processes())
    for rank in range(count):
        found = torch.load(folder / f"{rank}.pt")
        assert found.keys() == expected.keys()
        for name, gradient in expected.items():
            error = torch.linalg.vector_norm(found[name] - gradient)
            assert error <= 1e-9 * torch.linalg.vector_norm(gradient), (rank, name)


@pytest.mark.table(1)
@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("count", [2, 4])
@pytest.mark.parametrize("residual", RESIDUALS)
def test_gradients_of_the_first_step(tmp_path: Path, how: str, count: int, residual: str) -> None:
    check_gradients(config(tmp_path, residual, parallel=how), count, tmp_path / "out")


@pytest.mark.parametrize("residual", [name for name in BASELINES[1:] if name != "additive-conv"])
def test_gradients_of_sharded_baselines(tmp_path: Path, residual: str) -> None:
    """The sample above has `additive-conv` and the delta rule sharded."""
    check_gradients(config(tmp_path, residual, parallel="fsdp2"), 2, tmp_path / "out")


@pytest.mark.parametrize("how", HOW)
def test_one_process_with_the_data_of_another(
    tmp_path: Path, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The comparison of gradients sees it."""
    parts = Trainer._parts

    def wrong(self: Trainer) -> list[tuple[int, int]]:
        if not self.processes.alone:
            monkeypatch.setattr(self.processes, "rank", 0)
        return parts(self)

    monkeypatch.setattr(Trainer, "_parts", wrong)
    with pytest.raises(AssertionError, match=r"trunk|wte"):
        check_gradients(config(tmp_path, parallel=how), 2, tmp_path / "out")


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> TrainConfig:
    """20 steps of one process, with evaluations, recordings and samples."""
    ran = config(
        tmp_path_factory.mktemp("alone"),
        steps=20, eval_every=8, eval_batches=5, log_every=1, record_every=10, sample_every=10,
    )  # fmt: skip
    train(ran, quiet())
    return ran


@pytest.mark.table(0)
@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("count", [2, 4])
def test_losses_of_20_steps(alone: TrainConfig, tmp_path: Path, how: str, count: int) -> None:
    shared = replace(alone, out=tmp_path / "run", parallel=how)
    forked = together(count, tmp_path / "out", training(shared))
    check_losses(shared, alone)
    assert f"{count} processes ({how})" in forked.said(0)
    assert not any(forked.said(rank) for rank in range(1, count))
    found, expected = (RunDirectory(c.directory).recordings.read() for c in (shared, alone))
    assert [r["step"] for r in found] == [r["step"] for r in expected] == [10, 20]
    one, other = load(shared.directory, "cpu")[0], load(alone.directory, "cpu")[0]
    for (name, found_one), expected_one in zip(
        one.named_parameters(), other.parameters(), strict=True
    ):
        torch.testing.assert_close(found_one, expected_one, rtol=1e-3, atol=1e-4, msg=name)


@pytest.fixture(scope="module")
def documents(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A corpus with documents of one token, so that some windows have nothing to predict."""
    folder = tmp_path_factory.mktemp("documents")
    text = folder / "text.jsonl"
    texts = [f"The delta rule erases what it overwrites, {n} times." for n in range(60)]
    lines = [json.dumps({"text": text}) for text in [*texts, *(string.ascii_letters * 20)]]
    text.write_text("\n".join(lines))
    prepare(PrepareConfig((text,), out=folder / "shards", tokenizer="bytes", validation=0.1))
    return folder / "shards"


@pytest.mark.table(0)
@pytest.mark.parametrize("how", HOW)
def test_documents_apart(documents: Path, tmp_path: Path, how: str) -> None:
    """Every predicted token counts the same, in whichever process it is."""
    one = config(
        tmp_path, data=str(documents), separate_documents=True, steps=8, log_every=1
    )  # fmt: skip
    one = replace(one, batch_size=1, accumulation=4, out=tmp_path / "one")
    train(one, quiet())
    corpus = data.load(documents)
    predicted = [
        data.batch(corpus.train, 1, 32, seed=1337, step=s, first=p, documents=True).predicted
        for s in range(8)
        for p in range(4)
    ]
    assert 0 in predicted, predicted
    assert len(set(predicted)) > 2
    two = replace(one, out=tmp_path / "two", parallel=how)
    together(2, tmp_path / "out", training(two))
    check_losses(two, one)


def test_ddp_sums_gradients_once_per_step(tmp_path: Path) -> None:
    def act(rank: int) -> None:
        with joined(1) as processes:
            for accumulation in (2, 8):
                ran = replace(config(tmp_path), accumulation=accumulation)
                trainer = Trainer(ran, data.load("topics"), CPU, processes)
                buckets: list[int] = []

                trainer.forward.register_comm_hook(  # type: ignore[attr-defined]
                    None,
                    lambda _, bucket, buckets=buckets: (
                        buckets.append(bucket.buffer().numel()) or allreduce_hook(None, bucket)
                    ),
                )
                trainer.step()
                assert sum(buckets) == trainer.model.num_parameters()

    together(2, tmp_path / "out", act)


def test_fsdp2_sums_gradients_once_per_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    newer = hasattr(torch.distributed, "reduce_scatter_single")
    name = "reduce_scatter_single" if newer else "reduce_scatter_tensor"
    scatter, called = getattr(torch.distributed, name), []

    def counting(*arguments: Any, **options: Any) -> Any:
        called.append(1)
        return scatter(*arguments, **options)

    monkeypatch.setattr(torch.distributed, name, counting)

    def act(rank: int) -> None:
        with joined(1) as processes:
            for accumulation in (2, 8):
                ran = replace(config(tmp_path, parallel="fsdp2"), accumulation=accumulation)
                trainer = Trainer(ran, data.load("topics"), CPU, processes)
                called.clear()
                trainer.step()
                assert len(called) == len(trainer.model.trunk.sublayers) + 2  # trunk, embedding

    together(2, tmp_path / "out", act)


def test_fsdp2_shards_at_rest(tmp_path: Path) -> None:
    """Each process holds its part of parameters, gradients and Adam's moments."""

    def act(rank: int) -> None:
        with joined(1) as processes:
            trainer = Trainer(
                config(tmp_path, parallel="fsdp2"), data.load("topics"), CPU, processes
            )
            trainer.step()
            for name, parameter in trainer.model.named_parameters():
                assert isinstance(parameter, DTensor), name
                rows = -(-parameter.shape[0] // 4)
                most = rows * parameter[0].numel()
                assert parameter.to_local().numel() <= most, name
                for key in ("exp_avg", "exp_avg_sq"):
                    moment = trainer.optimizer.state[parameter][key]
                    assert moment.to_local().shape == parameter.to_local().shape

    together(4, tmp_path / "out", act)


@pytest.mark.table(0)
@pytest.mark.parametrize("how", HOW)
def test_recomputed_sublayers(alone: TrainConfig, tmp_path: Path, how: str) -> None:
    shared = replace(alone, out=tmp_path / "run", parallel=how, recompute=True)
    together(2, tmp_path / "out", training(shared))
    check_losses(shared, alone)


@pytest.mark.exhaustive
@pytest.mark.parametrize("how", HOW)
def test_compiled(alone: TrainConfig, tmp_path: Path, how: str) -> None:
    shared = replace(alone, out=tmp_path / "run", parallel=how, compile=True)
    together(2, tmp_path / "out", training(shared))
    check_losses(shared, alone)


@pytest.mark.exhaustive
@pytest.mark.parametrize("how", HOW)
def test_bfloat16(tmp_path: Path, how: str) -> None:
    """The sublayers are gathered in bfloat16; gates, reads and the embedding stay in float32."""
    one = replace(config(tmp_path, out=tmp_path / "one"), precision="bfloat16")
    train(one, quiet())
    two = replace(one, out=tmp_path / "two", parallel=how)
    together(2, tmp_path / "out", training(two))
    check_losses(two, one, tolerance=2e-3)


@pytest.mark.parametrize("how", HOW)
def test_equal_parts_are_needed(tmp_path: Path, how: str) -> None:
    def act(rank: int) -> None:
        with joined(1) as processes:
            sentence = "3 processes have equal parts .* got 4 × 2"
            with pytest.raises(ValueError, match=sentence):
                Trainer(config(tmp_path, parallel=how), data.load("topics"), CPU, processes)

    together(3, tmp_path / "out", act)


@pytest.mark.parametrize("count", [16, pytest.param(64, marks=pytest.mark.exhaustive)])
def test_many_processes(tmp_path: Path, count: int) -> None:
    ran = replace(config(tmp_path, "ddl"), batch_size=16, accumulation=4)
    alone = Trainer(ran, data.load("topics"), CPU)
    expected = [float(alone.step().loss), float(alone.step().loss), alone.evaluate()]

    def act(rank: int) -> None:
        with joined(2) as processes:
            trainer = Trainer(ran, data.load("topics"), CPU, processes)
            found = [float(trainer.step().loss), float(trainer.step().loss), trainer.evaluate()]
            assert found == pytest.approx(expected, rel=1e-5)

    together(count, tmp_path / "out", act)
