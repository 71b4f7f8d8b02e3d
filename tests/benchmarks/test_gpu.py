"""The measurements of the GPU benchmarks, on a CPU with the same code at tiny sizes.

test_gpu_day.py has the calls that measure, test_gpu_pieces.py their processes and commands.
"""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ddl import functional
from tests.benchmarks.test_benchmarks import load

__all__ = ["load"]  # a fixture
CPU = torch.device("cpu")
BF16, F32 = torch.bfloat16, torch.float32
CASE = {"op": "rewrite_read", "form": "token", "d": 16, "m": 4, "batch": 2, "time": 12}


@pytest.fixture
def clock(load: Any) -> Any:
    return load("ddl.lab.bench.clock").Clock(CPU, 2**16)


# --- time and the device --------------------------------------------------------------------------


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


def test_description_of_a_gpu(load: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    module = load("ddl.lab.bench.clock")
    properties = SimpleNamespace(
        name="NVIDIA H100", major=9, minor=0, multi_processor_count=132,
        total_memory=80 * 2**30, L2_cache_size=50 * 2**20,
    )  # fmt: skip
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(load("ddl.lab.machine"), "output", lambda *command: "580.1")
    described = module.describe(torch.device("cuda", 0))
    assert (described["device"], described["driver"]) == ("NVIDIA H100", "580.1")
    sizes = (described["capability"], described["memory_gib"], described["l2_mib"])
    assert sizes == ("9.0", 80, 50)


# --- training steps -------------------------------------------------------------------------------


def test_additions_of_the_bfloat16_stream(load: Any) -> None:
    """Under autocast alone; otherwise the model is the additive one."""
    day, steps = load("gpu.day"), load("gpu.steps")
    model = steps.make(day.step("additive", "bfloat16"), day.SMALL["model"], CPU)
    plain = steps.make(day.step("additive"), day.SMALL["model"], CPU)
    batch, seen = steps.random_tokens(model, 2, CPU), []
    model.trunk.norms[1].register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].dtype))
    torch.testing.assert_close(model(batch).logits, plain(batch).logits, rtol=0, atol=0)
    with torch.autocast("cpu", BF16):
        model(batch)
    assert seen == [F32, BF16]


@pytest.mark.parametrize("residual", ["ddl", "ddl-cc", "ddl-tc"])
def test_step_that_erases_nothing_agrees_with_plain_pytorch(load: Any, residual: str) -> None:
    day, steps = load("gpu.day"), load("gpu.steps")
    model = steps.make(day.step(residual, erase="none"), day.SMALL["model"], CPU)
    assert steps.check(model, steps.random_tokens(model, 2, CPU))["worst"] < 1e-5


@pytest.mark.parametrize("limit", ["TOLERANCE", "LARGEST_DRIFT"])
def test_wrong_step_is_not_kept(
    load: Any, clock: Any, monkeypatch: pytest.MonkeyPatch, limit: str, tmp_path: Any
) -> None:
    day, steps = load("gpu.day"), load("gpu.steps")
    monkeypatch.setattr(load("ddl.lab.bench.agreement"), limit, 1e-9)
    arguments = (day.step("ddl-tc"), day.SMALL["model"], str(tmp_path / "lock"))
    (line,) = steps.compiled_step(clock, *arguments)
    assert ("rms error" in line["gate"]["red"]) == (limit == "TOLERANCE")
    assert "peak_bytes" not in line
    assert steps.READY == []


def test_idle_time_between_kernels(load: Any) -> None:
    spans = [(0.0, 1000.0, "gemm"), (500.0, 1500.0, "copy"), (1600.0, 1700.0, "reduce"),
             (1650.0, 1660.0, "gemm"), (1700.5, 2000.5, "rewrite_read_fwd")]  # fmt: skip
    module = load("gpu.steps")
    line = module.idle_time(spans)
    assert line["idle_ms"] == pytest.approx(0.1005, abs=1e-3)
    assert line["gaps"] == [(100.0, "copy", "reduce"), (0.5, "gemm", "rewrite_read_fwd")]
    assert line["kernel_ms"] == pytest.approx(2.41)
    kernels = {"gemm": 1.01, "copy": 1.0, "rewrite_read_fwd": 0.3, "reduce": 0.1, "rest": 0.0}
    assert line["kernels_ms"] == pytest.approx(kernels)


class Crew:
    """Answers as the processes of three steps would; the third one dies in its second block."""

    def __init__(self) -> None:
        self.ready = {
            name: {"stream_dtype": name.split()[1], "peak_bytes": peak, "beyond": 2.0}
            for name, peak in (("additive float32", 100), ("ddl bfloat16", 105), ("ddl float32", 1))
        }
        self.workers = dict.fromkeys(self.ready, self)
        self.jobs: list[str] = []

    def send(self, job: str, arguments: dict[str, Any]) -> None:
        self.jobs.append(job)

    def answer(self, name: str) -> dict[str, Any]:
        if self.jobs[-1] == "profiled_step":
            return {"error": "no profiler"} if "additive" in name else {"idle_ms": 1.0}
        if name == "ddl float32" and len(self.jobs) > 3:
            del self.ready[name]
            return {"error": "killed"}
        return {"copies": [1.0, 1.0], "seconds": [8.0, 8.0] if "additive" in name else [10.0] * 2}


def test_steps_in_turns_are_compared(load: Any) -> None:
    day, crew = load("gpu.day"), Crew()
    cases = [day.step("additive"), day.step("ddl", "bfloat16"), day.step("ddl"), day.step("x")]
    rounds = load("gpu.rounds").Rounds("steps", crew, cases, 3, 2, profiles=True)
    died, additive, ours = rounds.lines(60)
    assert died == {"what": "ddl float32", "error": "killed"}
    assert (additive["ratio"], additive["floor"]) == (1, 0.8)
    assert additive["profile"] == "no profiler"  # and the times are kept
    assert (ours["ratio"], ours["memory_factor"], ours["idle_ms"]) == (0.8, 1.05, 1.0)
    assert len(ours["seconds"]) == 6
    assert "same_ratio" not in ours  # without bfloat16 additions


# --- operators ------------------------------------------------------------------------------------


@pytest.mark.parametrize("op", ["rewrite", "read", "rewrite_read", "expand"])
@pytest.mark.parametrize("m", [1, 4])
@pytest.mark.parametrize("features", [BF16, F32], ids=str)
@pytest.mark.parametrize("state", [BF16, F32], ids=str)
def test_plain_operators_agree_with_the_reference(
    load: Any, op: str, m: int, features: torch.dtype, state: torch.dtype
) -> None:
    problems, bench = load("ddl.lab.bench.problems"), load("ddl.lab.bench.ops")
    plain = getattr(load("ddl.lab.bench.plain"), op)
    for form in problems.forms_of(op, m):
        one = problems.Case(op, form, 15, m, 2, 9, state, features)
        forms = {style: partial(plain, style=style) for style in bench.plain_styles(one)}
        for style, operator in {"fused": getattr(functional, op), **forms}.items():
            allowed = problems.TOLERANCES if style == "fused" else bench.PLAIN_TOLERANCES
            assert problems.check(one, problems.build(one), operator, allowed) < 1


def test_operators_have_cold_arguments(load: Any, clock: Any) -> None:
    case = load("gpu.ops").case_of(CASE | {"state": "bfloat16"})
    state = 2 * 12 * 16 * 4 * 2  # bytes; a CPU's cache counts as 4,096
    assert load("ddl.lab.bench.ops").argument_sets(case, clock) == -(-4 * 4096 // state)


def test_wrong_operator_is_not_timed(
    load: Any, clock: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = functional.rewrite_read
    monkeypatch.setattr(
        functional, "rewrite_read", lambda **x: (y := right(**x))._replace(value=1.1 * y.value)
    )
    (line,) = load("gpu.ops").operators(clock, CASE | {"state": "bfloat16"}, 2)
    assert line["gate"]["red"].startswith("output 2: rms error")
    assert "forward" not in line
    table, _ = load("gpu.tables").operators([{"part": "operators", **line}])
    assert table.rows[0][6] == "RED"


def test_chain_with_other_bits_is_not_timed(
    load: Any, clock: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    ops, chained = load("gpu.ops"), functional.rewrite_read_chained

    def wrong(*, gate: torch.Tensor, **others: Any) -> Any:
        return chained(gate=gate * (1 + 2**-20), **others)

    monkeypatch.setattr(functional, "rewrite_read_chained", wrong)
    lines = list(ops.chains(clock, CASE | {"state": "float32"}, 2, (0, 1)))
    for line in lines:
        assert line["gate"]["red"].startswith("gradients with other bits: ")
    assert not any("backward" in line for line in lines)


def test_roof_is_compiled_without_a_gpu(load: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    roof, tools = load("gpu.roof"), pytest.importorskip("torch.cuda._utils")
    if torch.version.cuda is None:
        pytest.skip("torch was built without CUDA, so there is no NVRTC")
    monkeypatch.setattr("torch.utils.cpp_extension.CUDA_HOME", "/usr")
    names = set()
    for name, macros, grid in roof.walks(2**15, 132):
        assert macros["CHUNK"] * grid >= 2**15 or macros["CHUNK"] == 0
        options = roof.options(macros)
        code, _ = tools._nvrtc_compile(roof.SOURCE, "roof", "90", nvcc_options=options)
        assert code.startswith(b"\x7fELF")
        names.add(name)
    assert len(names) == 12


# --- tables ---------------------------------------------------------------------------------------


def test_goals_stand_beside_the_numbers(load: Any) -> None:
    mark = load("gpu.tables").mark
    assert (mark(0.93, 0.92), mark(0.91, 0.92)) == (" ✓ ≥ 0.92", " ✗ ≥ 0.92")
    assert (mark(21.0, -20.0), mark(20.0, -20.0)) == (" ✗ ≤ 20", " ✓ ≤ 20")
    assert mark(1.0, None) == mark(None, 20.0) == ""


def test_tables_of_steps(load: Any) -> None:
    """Goals are those of a stream's dtype, for the default N and rewrites that erase."""
    step = {"part": "steps", "residual": "ddl-cc", "stream_dtype": "float32", "erase": "tied",
            "anchor_every": 4, "default": True, "median": 0.07, "ratio": 0.85,
            "interval": [0.84, 0.86], "floor": 0.87, "idle_ms": 1.25, "peak_bytes": 2**34,
            "memory_factor": 1.06, "same_ratio": 0.85, "same_interval": [0.84, 0.86]}  # fmt: skip
    half = step | {"stream_dtype": "bfloat16"}
    none = step | {"erase": "none"}
    red = {name: step[name] for name in ("part", "residual", "stream_dtype", "erase")}
    module = load("gpu.tables")
    rows = module.steps([step, half, none, step | {"default": False}, red], "steps").rows
    assert rows[0] == [
        "ddl-cc", "float32", "4", "tied", "70.0", "0.850 ✓ ≥ 0.84", "0.840–0.860", "0.850",
        "0.840–0.860", "0.870", "1.2", "16.0", "1.060 ✗ ≤ 1.05", "",
    ]  # fmt: skip
    assert [row[5] for row in rows[1:]] == ["0.850 ✗ ≥ 0.91", "0.850", "0.850", ""]
    assert rows[-1][4] == "RED"


def test_tables_of_operators(load: Any) -> None:
    """A plan stands beside the planner's own, by shares of the copies that were timed with each."""
    own = {"part": "operators", "op": "rewrite_read", "form": "channel", "d": 8, "m": 4,
           "state": "float32", "device": "NVIDIA H200", "copy": {"gb_s": 4000.0},
           "forward": {"gb_s": 3600.0}, "backward": {"gb_s": 2000.0, "median": 1e-4}}  # fmt: skip
    plan = own | {"part": "plans", "plan": "CHUNK=8", "copy": {"gb_s": 2000.0}}
    module = load("gpu.tables")
    first, second = module.operators([own, plan])
    assert first.rows[0][6:] == ["0.90 ✓ ≥ 0.82", "0.75", "0.50 ✗ ≥ 0.78", "0.42", "1.00", "1.00"]
    assert second.rows[0][5:] == [
        "CHUNK=8", "1.80 ✓ ≥ 0.82", "0.75", "1.00 ✓ ≥ 0.78", "0.42", "0.50", "0.50",
    ]  # fmt: skip
    chain = own | {"part": "chains", "links": 0}
    longer = chain | {"links": 3, "backward": {"gb_s": 1000.0, "median": 2e-4}}
    rows = module.chains([chain, longer, chain | {"plan": "X=1"}]).rows
    assert [row[2:] for row in rows] == [
        ["", "0", "100", "0.50", "1.00"], ["", "3", "200", "0.25", "2.00"],
        ["X=1", "0", "100", "0.50", "1.00"],
    ]  # fmt: skip


def test_tables_of_records_before_this_format(
    load: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    results = load("gpu.__main__").RESULTS
    assert load("gpu.__main__").main(["show", *(f"{results}/gpu-{n}.jsonl" for n in "123")]) == 0
    shown = capsys.readouterr().out
    assert "| ddl-cc   | float32 |   |       | 79.6 |        0.778 ✗ ≥ 0.84 |" in shown
    assert "| rewrite_read | forward            | 64.3 ✗ ≤ 45 |" in shown
