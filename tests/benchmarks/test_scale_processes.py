"""The formulas of benchmarks/scale against processes: messages, shards, and the most in a step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from ddl.lab import data
from ddl.lab.config import GPTConfig, TrainConfig
from ddl.lab.train import Trainer
from ddl.lab.train.parallel import accumulating, spread, whole
from ddl.lab.train.processes import ALONE, Processes, joined
from ddl.models import GPT
from ddl.optim import make_optimizer
from tests.benchmarks.test_benchmarks import load
from tests.benchmarks.test_scale import config
from tests.support.collectives import Collectives, lonely
from tests.support.processes import together
from tests.support.train_cases import short

__all__ = ["load"]

CPU = torch.device("cpu")
TOLERANCE = 0.06  # of the peak: while the last sublayer goes backward, tensors come and go


class Steps:
    """A model as `ddl train` spreads it, and steps without their last line, zero_grad."""

    def __init__(self, config: TrainConfig, processes: Processes) -> None:
        self.config, self.count = config, processes.count
        self.model = GPT(config.model)
        self.forward = spread(self.model, config, CPU, processes)
        self.optimizer = make_optimizer(self.model, config.optim)
        self.idx = torch.zeros(config.batch_size, config.model.block_size, dtype=torch.int64)

    def step(self) -> None:
        mixed = self.config.precision == "bfloat16"
        passes = self.config.accumulation // self.count
        for index in range(passes):
            with accumulating(self.forward, last=index == passes - 1):
                with torch.autocast("cpu", dtype=torch.bfloat16, enabled=mixed):
                    loss = self.forward(self.idx, labels=self.idx).loss
                loss.backward()
        whole(torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0))
        self.optimizer.step()

    def zero_grad(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)


# --- messages -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("count", "variant", "options"),
    [
        (64, "ddl-cc", {"precision": "bfloat16"}),
        (1024, "ddl-tc", {"precision": "float32", "recompute": True}),
        (8, "additive", {"precision": "bfloat16", "accumulation": 16}),
    ],
)
def test_what_fsdp2_sends(
    load: Any, tmp_path: Path, count: int, variant: str, options: dict[str, Any]
) -> None:
    """Every message of a step, to the byte. One process is real, the group's sizes are, too."""
    messages = load("scale.traffic").messages
    options = {"accumulation": count, "parallel": "fsdp2"} | options
    used = config(variant, **options)

    def act(rank: int) -> None:
        with lonely(count) as processes:
            steps = Steps(used, processes)
            with Collectives() as collectives:
                steps.step()
            expected = messages(used, count)[:-1]  # the loss is the trainer's
            assert collectives.seen == Counter((m.kind, m.bytes) for m in expected)

    together(1, tmp_path / "out", act)


def test_the_stream_is_not_padded_to_a_row_for_each_process(tmp_path: Path) -> None:
    """Gates have one row and values m. On 16 processes only their biases get 16 rows."""
    used = config("ddl-cc", parallel="fsdp2", accumulation=16)
    trunk = GPT(used.model).trunk
    own = [p for name, p in trunk.named_parameters() if not name.startswith("sublayers")]
    size = 4 * sum(16 if p.shape[0] < 16 and p.ndim == 1 else p.numel() for p in own)

    def act(rank: int) -> None:
        with lonely(16) as processes:
            steps = Steps(used, processes)
            with Collectives() as collectives:
                steps.step()
            assert collectives.seen["gather", size] == 2

    together(1, tmp_path / "out", act)


@pytest.mark.parametrize("parallel", ["ddp", "fsdp2"])
def test_what_the_trainer_sends(load: Any, tmp_path: Path, parallel: str) -> None:
    """Every message of a step of two real processes. DDP's bucket is one, because all fits."""
    messages, corpus = load("scale.traffic").messages, data.load("topics")
    used = short(tmp_path, parallel=parallel, batch_size=2, accumulation=4)

    def act(rank: int) -> None:
        with joined(minutes=1) as processes:
            trainer = Trainer(used, corpus, CPU, processes)
            trainer.flags = lambda: (False,) * 3
            for _ in range(2):  # DDP orders its buckets in the second
                trainer.step()
            with Collectives() as collectives:
                trainer.step()
            assert collectives.seen == Counter((m.kind, m.bytes) for m in messages(used, 2))

    together(2, tmp_path / "out", act)


def test_bytes_in_a_ring(load: Any) -> None:
    """Of a gathered tensor a process sends all parts but one; of a sum twice that."""
    Message = load("scale.traffic").Message
    assert Message("gather", "mlp", 800).sent(8) == 700
    assert Message("scatter", "mlp", 800).sent(8) == 700
    assert Message("reduce", "gradients", 800).sent(8) == 1400
    assert load("scale.traffic").messages(config("ddl-cc"), 1) == []


# --- shards ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("count", "variant"),
    [
        (2, "ddl-cc"),
        (4, "ddl-cc"),
        pytest.param(4, "additive", marks=pytest.mark.exhaustive),
        pytest.param(3, "ddl-tc", marks=pytest.mark.exhaustive),
    ],
)
def test_what_a_process_holds(load: Any, tmp_path: Path, count: int, variant: str) -> None:
    """Parameters, gradients and moments of uneven shards, to the byte; moments without padding."""
    memory, parameters = load("scale.memory"), load("scale.parameters")
    used = config(variant, parallel="fsdp2", accumulation=count)
    expected = memory.state(used, count)
    steps_of_adam = 4 * parameters.tensors(used.model)

    def act(rank: int) -> None:
        with joined(minutes=1) as processes:
            steps = Steps(used, processes)
            steps.step()
            shards = list(steps.model.parameters())
            assert _storages(shards) == expected.parameters
            assert _storages(p.grad for p in shards) == expected.gradients
            moments = [t for state in steps.optimizer.state.values() for t in state.values()]
            held = sum(_local(t).nbytes for t in moments)
            assert held == expected.moments if processes.first else held <= expected.moments
            of_all = sum(processes.gather(held - steps_of_adam))
            assert of_all == 8 * parameters.count(used.model)

    together(count, tmp_path / "out", act)


def test_what_a_copy_holds(load: Any) -> None:
    used = config("ddl-cc", accumulation=1)
    steps, expected = Steps(used, ALONE), load("scale.memory").state(used, 1)
    steps.step()
    own = list(steps.model.parameters())
    moments = [t for state in steps.optimizer.state.values() for t in state.values()]
    sizes = [_storages(tensors) for tensors in (own, (p.grad for p in own), moments)]
    assert sizes == list(expected)


def _local(tensor: Any) -> Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def _storages(tensors: Any) -> int:
    """Bytes of the distinct storages."""
    storages = [_local(tensor).untyped_storage() for tensor in tensors]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


# --- the most in a step ---------------------------------------------------------------------------

DEEP = {"vocab_size": 512, "num_layers": 4, "hidden_size": 256}
WIDE_HEAD = {"vocab_size": 8192, "num_layers": 2, "hidden_size": 128}
CASES: list[Any] = [
    (1, WIDE_HEAD, {"residual": "ddl-cc"}, {"precision": "bfloat16", "batch_size": 4}),
    (1, DEEP, {"residual": "ddl-cc", "anchor_every": 1}, {"precision": "float32"}),
    (16, WIDE_HEAD, {"residual": "ddl-cc"}, {"precision": "bfloat16"}),
]
MORE: list[Any] = [
    (count, sizes, {"residual": residual}, {"precision": precision, "recompute": recompute} | rest)
    for count in (1, 16)
    for sizes in (DEEP, WIDE_HEAD)
    for residual in ("additive", "ddl-cc")
    for precision in ("float32", "bfloat16")
    for recompute in (False, True)
    for rest in ({"batch_size": 4}, {"accumulation": 2 * count})
]


@pytest.mark.table(0)
@pytest.mark.parametrize(
    ("count", "sizes", "residual", "options"),
    [*CASES, *(pytest.param(*case, marks=pytest.mark.exhaustive) for case in MORE)],
)
def test_the_most_in_a_step(
    load: Any, tmp_path: Path, count: int, sizes: Any, residual: Any, options: Any
) -> None:
    """The peak of torch's allocator, within `TOLERANCE`; within 1 % if the loss decides."""
    memory, peak_bytes = load("scale.memory"), load("memory").peak_bytes
    model = GPTConfig(block_size=256, num_heads=2, **sizes, **residual)
    used = TrainConfig(
        model=model,
        parallel="fsdp2",
        **({"batch_size": 1, "accumulation": count} | options),
    )

    def act(rank: int) -> None:
        if count == 1:
            _compare(used, ALONE, memory, peak_bytes)
            return
        with lonely(count) as processes:
            _compare(used, processes, memory, peak_bytes)

    together(1, tmp_path / "out", act)


def _compare(
    used: TrainConfig, processes: Processes, memory: Any, peak_bytes: Callable[..., int]
) -> None:
    steps = Steps(used, processes)
    steps.step()
    steps.zero_grad()
    held = memory.state(used, processes.count)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as run:
        steps.step()
    found = held.parameters + held.moments + peak_bytes(run)
    peak = memory.peak(used, processes.count, gpu=False)
    tolerance = 0.01 if max(peak) == peak.loss and peak.loss > 1.05 * peak.last else TOLERANCE
    assert found == pytest.approx(max(peak), rel=tolerance), peak
