"""The measurements of the GPU benchmarks, on a CPU with the same code at tiny sizes.

test_gpu_day.py has the calls that measure it, test_gpu_pieces.py what they are made of.
"""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import ddl.cuda
from ddl import functional
from ddl.lab.config import GPTConfig
from tests.benchmarks.test_benchmarks import load

__all__ = ["load"]  # a fixture
CPU = torch.device("cpu")
TINY = GPTConfig(vocab_size=32, block_size=12, num_layers=1, num_heads=2, hidden_size=16)
BF16, F32 = torch.bfloat16, torch.float32


@pytest.fixture
def clock(load: Any) -> Any:
    return load("ddl.lab.bench.clock").Clock(CPU, 2**16)


def setting(load: Any, **changes: Any) -> Any:
    models = load("gpu.models")
    usual = models.Setting(
        "tiny", TINY, ("additive", "ddl-tc"), "autocast", "eager", 2, "aot_eager"
    )
    return replace(usual, **changes)


def case(load: Any, op: str = "rewrite_read", form: str = "token", m: int = 4) -> Any:
    return load("ddl.lab.bench.problems").Case(op, form, 16, m, 2, 12, BF16, BF16)


@pytest.mark.table(0)
@pytest.mark.parametrize(
    "changes",
    [{}, {"precision": "bfloat16"}, {"mode": "compiled", "residuals": ("additive", "ddl")}],
    ids=str,
)
def test_training_steps(load: Any, clock: Any, changes: dict[str, Any]) -> None:
    train = load("gpu.train").train
    additive, ours = train(setting(load, **changes), clock, rounds=3)
    assert additive["ratio"] == additive["whole_ratio"] == 1
    for line in (additive, ours):
        assert line["gate"]["red"] is None
        compiled = line["mode"] == "compiled"  # by a backend without optimisations
        assert line["gate"]["drift"] == 0 if compiled else 0 < line["gate"]["drift"] < 0.15
        assert line["batch"] == 2
        assert line["tokens_per_s"] == pytest.approx(24 / line["whole_median"])
        assert line["whole_median"] >= line["median"]
        assert line["ratio"] == pytest.approx(additive["median"] / line["median"])
        assert 0 < line["floor"] <= 1
    lines = [{"part": "train", "device": "NVIDIA H200", **x} for x in (additive, ours)]
    table = load("gpu.tables_models").training(lines)
    goals = [{"ddl-tc": "≥ 0.93", "ddl": "≥ 0.99", "additive": ""}[x["residual"]] for x in lines]
    assert [row[9] for row in table.rows] == goals


def test_prefill(load: Any, clock: Any) -> None:
    chosen = setting(load, precision="bfloat16")
    lines = list(load("gpu.train").prefill(chosen, clock, rounds=2, batches=(1, 2)))
    assert [(x["residual"], x["batch"]) for x in lines] == [
        ("additive", 1), ("ddl-tc", 1), ("additive", 2), ("ddl-tc", 2),
    ]  # fmt: skip
    assert all(x["ratio"] > 0 and x["tokens_per_s"] > 0 for x in lines)


def test_marks_are_events_on_a_gpu(load: Any, clock: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Events are recorded in the order of the work, the copy first; milliseconds become seconds."""
    done: list[str] = []

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            self.at = len(done)
            done.append("mark")

        def synchronize(self) -> None:
            assert self.at == len(done) - 1
            done.append("wait")

        def elapsed_time(self, later: Event) -> float:
            assert done[-1] == "wait"
            return 1000.0 * (later.at - self.at)

    monkeypatch.setattr(torch.cuda, "Event", Event)
    clock.source.fill_(3.0)
    clock.target.zero_()
    clock.device = torch.device("cuda", 0)
    timed = clock.timed(lambda: done.append("a"), lambda: done.extend("bb"))
    assert timed() == (1.0, 2.0, 3.0)
    assert done == ["mark", "mark", "a", "mark", "b", "b", "mark", "wait"]
    assert clock.target.eq(3).all()
    assert clock.copied_bytes == 2**17


def test_memory_is_of_one_model_alone(
    load: Any, clock: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory is the model's own tensors plus the step's peak above all held tensors."""
    peaks = iter([1000, 5000])
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: next(peaks))
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: next(peaks))
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: None)
    module = load("gpu.train")
    chosen = setting(load, residuals=("additive",))
    with load("gpu.models").checked_candidates(chosen, CPU) as (candidate,):
        steps = module.stages(candidate, chosen.tokens(2, CPU), chosen)
        for step in steps:
            step()
        clock.device = torch.device("cuda", 0)
        found = module.peak_bytes(candidate, steps, clock)
        parameters = sum(p.numel() for p in candidate.model.parameters())
        moments_and_steps = 2 * 4 * parameters + 4 * len(list(candidate.model.parameters()))
        rotary = sum(b.nbytes for b in candidate.model.buffers())
    assert found == 4000 + 4 * parameters + moments_and_steps + rotary


def test_a_gpu_is_described(load: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    module = load("ddl.lab.bench.clock")
    properties = SimpleNamespace(
        name="NVIDIA H100", major=9, minor=0, multi_processor_count=132,
        total_memory=80 * 2**30, L2_cache_size=50 * 2**20,
    )  # fmt: skip
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(load("ddl.lab.machine"), "output", lambda *command: "580.1")
    described = module.describe(torch.device("cuda", 0))
    assert (described["device"], described["driver"]) == ("NVIDIA H100", "580.1")
    assert (described["capability"], described["memory_gib"], described["l2_mib"]) == (
        "9.0",
        80,
        50,
    )


def test_the_batch_is_halved_until_it_fits(
    load: Any, clock: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = load("gpu.train")
    right = module.stages

    def stages(candidate: Any, batch: Any, chosen: Any) -> Any:
        if len(batch) > 3 and candidate.residual == "ddl-tc":
            raise torch.OutOfMemoryError("CUDA out of memory")
        return right(candidate, batch, chosen)

    monkeypatch.setattr(module, "stages", stages)
    lines = module.train(setting(load, batch=8), clock, rounds=2)
    assert [line["batch"] for line in lines] == [2, 2]


def test_a_model_that_leads_elsewhere_is_not_timed(
    load: Any, clock: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(load("ddl.lab.bench.agreement"), "LARGEST_DRIFT", 1e-6)
    lines = load("gpu.train").train(setting(load), clock, rounds=2)
    assert all("in bfloat16 its gradients are" in line["gate"]["red"] for line in lines)
    assert not any("median" in line for line in lines)


def test_decoding(load: Any, clock: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The time of cached steps alone; a cache that changes the logits is not timed."""
    train, models = load("gpu.train"), load("gpu.models")
    chosen = setting(load, precision="bfloat16")
    timing = {"clock": clock, "rounds": 2, "batches": (2,), "prompt": 4, "tokens": 3}
    lines = list(train.decode(chosen, **timing))
    assert [line["residual"] for line in lines] == ["additive", "ddl-tc"]
    for line in lines:
        assert line["tokens_per_s"] == pytest.approx(2 * 3 / line["whole_median"])
    ready = SimpleNamespace(timed=lambda *stages: lambda: (0.5, 1.0, 4.0))
    assert train.decoding(None, None, 3, ready)() == (0.5, 3.0)  # the prompt's part is taken off
    monkeypatch.setattr(models, "TOLERANCE", 0.0)
    red = list(train.decode(chosen, **timing))
    assert all("logits of a cached step: rms error" in line["gate"]["red"] for line in red)
    assert not any("median" in line for line in red)


@pytest.mark.parametrize("op", ["rewrite", "read", "rewrite_read", "expand"])
@pytest.mark.parametrize("m", [1, 4])
@pytest.mark.parametrize("features", [BF16, F32], ids=str)
@pytest.mark.parametrize("state", [BF16, F32], ids=str)
def test_plain_operators_agree_with_the_reference(
    load: Any, op: str, m: int, features: torch.dtype, state: torch.dtype
) -> None:
    problems, ops = load("ddl.lab.bench.problems"), load("gpu.ops")
    allowed = load("ddl.lab.bench.ops").PLAIN_TOLERANCES
    for form in problems.forms_of(op, m):
        one = problems.Case(op, form, 15, m, 2, 9, state, features)
        for candidate in ("fused", *ops.plain_forms(one)):
            plain = ops.operator(one, candidate, "aot_eager")
            tolerances = problems.TOLERANCES if candidate == "fused" else allowed
            assert problems.check(one, problems.build(one), plain, tolerances) < 1


def test_candidates_take_turns_on_cold_arguments(load: Any, clock: Any) -> None:
    ops = load("gpu.ops")
    forms = ["fused", *ops.plain_forms(case(load)), "compiled broadcasts"]
    lines = ops.interleave_forms(case(load), forms, clock, 2, "aot_eager")
    assert [line["candidate"] for line in lines] == forms
    assert len(forms) == 4
    state = 2 * 12 * 16 * 4 * 2  # bytes; the test's cache size is 4096
    sets = load("ddl.lab.bench.ops").argument_sets(case(load), clock)
    assert sets == -(-4 * 4096 // state)
    one = load("ddl.lab.bench.problems").build(case(load))
    assert lines[0]["forward"]["bytes"] == one.forward_bytes  # of one call
    named = [{"part": "plain", **line} for line in lines[:3]]
    table = load("gpu.tables").operators(named)
    took = [line["forward"]["median"] + line["backward"]["median"] for line in lines[:3]]
    assert table.rows[0][-2:] == [f"{min(took[1:]) / took[0]:.1f}", ""]


def test_kernels_are_compiled_ahead(load: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    architectures = []

    def warmup(module: Any, *args: Any, architecture: str | None) -> list[Any]:
        architectures.append(architecture)
        outputs = module(*args)
        assert [output.state.shape for output in outputs] == [(1, 8, 16, 4)] * 2
        kernel = ddl.cuda.Kernel(
            "rewrite_read_bwd", "sm_90", "CLUSTER=1 THREADS=96 BLOCKS=4", 168, 0, 30_944, 0.5, False
        )
        full = kernel._replace(registers=169)  # a warp gets 5,632 in place of 5,376
        return [kernel, kernel._replace(spilled=8), full, kernel._replace(shared=60_000)]

    monkeypatch.setattr(ddl.cuda, "warmup", warmup)
    every = [case(load), case(load, form="channel")]
    (line,) = load("gpu.compile").compile_ops(every, CPU)
    assert (line["kernels"], line["found"], line["compiler_seconds"]) == (4, 0, 2.0)
    assert [kernel["spilled"] for kernel in line["spilling"]] == [8]
    crowded = [(kernel["registers"], kernel["shared"]) for kernel in line["crowded"]]
    assert crowded == [(169, 30_944), (168, 60_000)]
    load("gpu.compile").compile_ops(every, torch.device("cuda", 0))
    assert architectures == ["sm_90", None]  # an H100's without a GPU


def test_what_is_wrong_is_not_timed(load: Any, clock: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    right = functional.read

    def wrong(**arguments: Any) -> Any:
        result = right(**arguments)
        return result._replace(value=result.value * 1.1)

    monkeypatch.setattr(functional, "read", wrong)
    one = case(load, "read", "channel")
    fused, plain = load("gpu.ops").interleave_forms(
        one, ["fused", "eager products"], clock, 2, "aot_eager"
    )
    assert fused["gate"]["red"].startswith("output 1: rms error")
    assert "forward" not in fused
    assert plain["forward"]["median"] > 0
    faults = load("gpu.log").faults([{"part": "ops", **line} for line in (fused, plain)])
    assert faults == [f"ops read channel d=16 m=4 bfloat16 fused: {fused['gate']['red']}"]


def test_goals_stand_beside_the_numbers(load: Any) -> None:
    report = load("gpu.tables")
    assert report.against(0.93, 0.92, ".3f") == ("0.930 ✓", "≥ 0.92")
    assert report.against(0.91, 0.92, ".3f") == ("0.910 ✗", "≥ 0.92")
    assert report.against(21.0, 20.0, ".1f", least=False) == ("21.0 ✗", "≤ 20")
    assert report.against(1.0, None, ".1f") == ("1.0", "")
    assert report.against(None, 20.0, ".1f") == ("", "")
    goal_of = load("gpu.tables_models").goal_of
    assert goal_of({"residual": "ddl-cc", "device": "NVIDIA H200"}) == 0.94
    assert goal_of({"residual": "ddl-cc-noec", "device": "NVIDIA H100 80GB HBM3"}) == 0.92
