"""The benchmarks run end to end at tiny sizes, write valid records, never time wrong results."""

from __future__ import annotations

import importlib
import json
import math
import os
import statistics
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from ddl import functional, reference
from ddl.lab.config import PUBLISHED
from ddl.models import GPT, GPTConfig
from tests.support import ROOT

BENCHMARKS = ROOT / "benchmarks"
ROUNDS = 3
GROUPS = ("fused", "plain")


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Import a benchmark's module as `python benchmarks/…` does."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))

    return importlib.import_module


@pytest.fixture
def run(load: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Any:
    """Run a benchmark; return its only record."""

    def record_of(name: str, *options: str) -> dict[str, Any]:
        given = ["--quick", "--threads", "1", "--rounds", str(ROUNDS), "--out", str(tmp_path)]
        assert load(name).main([*given, *options]) == 0
        return the_record(name, tmp_path, capsys.readouterr().out)

    return record_of


def the_record(name: str, out: Path, stdout: str) -> dict[str, Any]:
    """Return the only record of a run, after checking that its table was printed."""
    lines = (out / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()
    assert len(lines) == 1
    assert (out / f"{name}.md").read_text(encoding="utf-8").splitlines()[0] in stdout
    assert str(ROOT) not in lines[0]
    assert str(out) not in lines[0]
    return json.loads(lines[0])


def assert_describes_the_run(record: dict[str, Any]) -> None:
    assert record["torch"] == torch.__version__
    assert record["threads"] == 1
    assert record["machine"]["cores"] >= 1
    assert record["machine"]["memory_gib"] > 0
    assert record["machine"]["cpu"]
    assert len(record["load_average"]) == 3
    assert len(record["native"]) == 12
    commit = record["commit"]
    assert commit is None or len(commit["hash"]) == 40


def test_train_step_eager_with_peers(tmp_path: Path) -> None:
    """In a process of its own, as it is called."""
    command = [sys.executable, str(BENCHMARKS / "train_step.py"), "--quick", "--threads", "1"]
    command += ["--no-compile", "--rounds", str(ROUNDS), "--out", str(tmp_path)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120)
    assert done.returncode == 0, done.stderr
    record = the_record("train_step", tmp_path, done.stdout)
    assert_describes_the_run(record)
    assert record["step"] == ["zero_grad", "forward", "backward"]
    assert record["copies"]["eager"]["copy_gb_s"] > 0
    results = {(r["residual"], r["heat"]): r for r in record["results"]}
    assert len(results) == len(record["results"])
    assert set(results) == {(residual, group) for residual in PUBLISHED for group in GROUPS}
    assert all(r["form"] == h for (name, h), r in results.items() if name != "additive")
    for group in GROUPS:
        assert results["additive", group]["form"] == "plain"
        assert results["additive", group]["ratio"] == 1
    for result in results.values():
        assert result["gate"]["red"] is None
        assert result["gate"]["worst"] <= result["gate"]["tolerance"]
        assert "compile_seconds" not in result
        assert len(result["seconds"]) == ROUNDS
        assert result["median"] == statistics.median(result["seconds"]) > 0
        additive = results["additive", result["heat"]]  # measured in the same rounds
        assert result["ratio"] == pytest.approx(additive["median"] / result["median"])
        low, high = result["interval"]
        assert low <= result["ratio"] * (1 + 1e-9)
        assert high >= result["ratio"] * (1 - 1e-9)
    for residual in set(PUBLISHED) - {"additive"}:
        fused, plain = (results[residual, group] for group in GROUPS)
        assert fused["faster_than_plain"] == pytest.approx(fused["ratio"] / plain["ratio"])
        assert 0 < fused["floor"] < 1


@pytest.mark.exhaustive
def test_train_step_compiled(load: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--quick", "--threads", "1", "--rounds", str(ROUNDS), "--out", str(tmp_path)]
    options += ["--no-eager", "--variants", "ddl-tc", "--layers", "1"]
    try:
        assert load("train_step").main([*options, "--backend", "eager"]) == 0
    finally:
        torch._dynamo.reset()
    record = the_record("train_step", tmp_path, capsys.readouterr().out)
    forms = [(r["residual"], r["form"], r["mode"]) for r in record["results"]]
    assert forms == [
        ("additive", "plain", "compiled"),
        ("ddl-tc", "fused", "compiled"),
        ("additive", "plain", "compiled"),
        ("ddl-tc", "plain", "compiled"),
    ]
    assert all(len(r["seconds"]) == ROUNDS for r in record["results"])
    compiled = [r for r in record["results"] if "compile_seconds" in r]
    assert len(compiled) == 3
    for result in compiled:  # the time to compile must not be in any step
        assert result["compile_seconds"] > max(result["seconds"])
    assert 0 < record["peak_gib"] < record["machine"]["memory_gib"]
    (note,) = [
        line
        for line in (tmp_path / "train_step.md").read_text().splitlines()
        if line.startswith("seconds of the first compiled step")
    ]
    assert all(f"{residual} {form} " in note for residual, form, _ in forms)


HALF = ["--precision", "autocast", "--stream-dtype", "bfloat16", "--anchor-every", "3"]


def test_train_step_under_autocast(
    load: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--quick", "--threads", "1", "--rounds", str(ROUNDS), "--out", str(tmp_path)]
    options += ["--no-compile", "--no-peer", "--variants", "ddl-tc", *HALF]
    assert load("train_step").main(options) == 0
    name = "train_step-autocast-anchors-3-stream-bfloat16"
    record = the_record(name, tmp_path, capsys.readouterr().out)
    assert record["config"]["autocast"]
    assert record["config"]["stream_dtype"] == "bfloat16"
    assert record["config"]["anchor_every"] == 3
    for result in record["results"]:
        assert result["gate"]["worst"] <= result["gate"]["tolerance"]  # in float32
        assert 1e-4 < result["gate"]["drift"] < 0.1  # under autocast
        assert len(result["seconds"]) == ROUNDS


def test_train_step_is_red_if_bfloat16_is_far_off(
    load: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(load("ddl.lab.bench.agreement"), "LARGEST_DRIFT", 1e-6)
    options = ["--quick", "--threads", "1", "--rounds", "1", "--out", str(tmp_path)]
    options += ["--no-compile", "--no-peer", "--variants", "ddl", "--precision", "autocast"]
    assert load("train_step").main(options) == 1
    record = json.loads((tmp_path / "train_step-autocast.jsonl").read_text())
    assert all("bfloat16" in result["gate"]["red"] for result in record["results"])


def test_a_goal_is_reached_by_the_upper_end_of_the_interval(load: Any) -> None:
    results = load("train_results")
    reached = {"gate": {"red": None}, "quartiles": (0.1, 0.2), "median": 0.15, "ratio": 0.9}
    for goal, mark in ((0.91, "✓"), (0.92, "✗")):
        cells = results.timing_cells(reached | {"interval": (0.88, 0.915), "goal": goal})
        assert cells[2] == f"0.900 {mark}"


def test_a_longer_chain_has_a_lower_floor(load: Any) -> None:
    bound, traffic = load("common.floor"), load("ddl.lab.bench.traffic")
    features = bound.boundary_features(6, 2048, 384)
    floors = [
        bound.floor("ddl-cc", features, 0.7, 20, state=4, features=4, links=links)
        for links in (0, 2.8)
    ]
    assert floors[1] < floors[0] < 1
    longer = traffic.boundary("ddl-cc", features=2, links=3)
    assert longer - traffic.boundary("ddl-cc", features=2) == 6  # three directions of two bytes


def test_ops(run: Any) -> None:
    record = run("ops", "--sizes", "63", "--channels", "1", "4")
    assert_describes_the_run(record)
    results = {(r["op"], r["form"], r["m"], r["rewrites"]): r for r in record["results"]}
    assert len(results) == len(record["results"]) == 2 + 4 + 3 * 4 + 3
    for result in results.values():
        assert result["gate"]["red"] is None
        state = 4 * result["batch"] * result["time"] * result["d"] * result["m"]
        assert result["state_bytes"] == state
        assert result["copy"]["bytes"] == 2 * state
        for name in ("forward", "backward", "copy"):
            part = result[name]
            assert len(part["seconds"]) == ROUNDS
            assert part["gb_s"] == pytest.approx(part["bytes"] / part["median"] / 1e9)


@pytest.mark.parametrize(
    ("case", "forward", "backward"),  # in d elements per token, m = 4
    [
        (("rewrite", ""), 4 + 1 + 4, 4 + 4 + 1 + 4 + 1),  # X k X'; G X k dX dk
        (("read", "channel"), 4 + 1, 4 + 1 + 4),  # X h; X dh dX
        (("read", "token"), 4 + 1 + 1, 4 + 1 + 4 + 1),  # and x
        (("rewrite_read", "channel"), 10, 15),
        (("rewrite_read", "token"), 11, 16),
        (("expand", "repeat"), 1 + 4, 4 + 1),  # x X; G dx
        (("expand", "conv"), 1 + 4, 4 + 1 + 1),  # and x
    ],
)
def test_bytes_that_must_move(load: Any, case: Any, forward: int, backward: int) -> None:
    problems = load("ddl.lab.bench.problems")
    problem = problems.build(problems.Case(*case, d=63, m=4, batch=2, time=5))
    row = 2 * 5 * 63 * 4
    assert (problem.forward_bytes, problem.backward_bytes) == (forward * row, backward * row)


@pytest.mark.parametrize("rewrites", [2, 4])
def test_further_rewrites_move_their_directions_alone(load: Any, rewrites: int) -> None:
    problems = load("ddl.lab.bench.problems")
    sizes = {"d": 63, "m": 4, "batch": 2, "time": 5, "rewrites": rewrites}
    problem = problems.build(problems.Case("rewrite_read", "channel", **sizes))
    row = 2 * 5 * 63 * 4
    assert problem.inputs["direction"].nbytes == rewrites * row
    assert problem.forward_bytes == (10 + rewrites - 1) * row
    assert problem.backward_bytes == (15 + 2 * (rewrites - 1)) * row
    assert (
        problems.check(
            problems.Case("rewrite_read", "channel", **sizes), problem, functional.rewrite_read
        )
        < 1
    )


def test_bytes_follow_the_storage_types(load: Any) -> None:
    problems = load("ddl.lab.bench.problems")
    wide = problems.Case("rewrite_read", "token", 8, 4, 2, 5, torch.float32, torch.bfloat16)
    problem, row = problems.build(wide), 2 * 5 * 8
    # X X' and x in float32, k and h in bfloat16; G X dX and x, k dh dk
    assert problem.forward_bytes == row * (4 * (4 + 4 + 1) + 2 * (1 + 1))
    assert problem.backward_bytes == row * (4 * (4 + 4 + 4 + 1) + 2 * (1 + 1 + 1))
    moving = [*problem.outputs(functional.rewrite_read)[:2], *problem.inputs.values()]
    assert sum(t.nbytes for t in moving[:4]) + row * 4 == problem.forward_bytes


def test_floor_counts_what_the_operator_benchmark_counts(load: Any) -> None:
    traffic = load("ddl.lab.bench.traffic")
    assert traffic.boundary("additive") == 4 + 4
    assert traffic.boundary("ddl") == 4 + 6
    assert traffic.boundary("ddl-cc") == 10 + 15
    assert traffic.boundary("ddl-tc-noec") == 11 + 16
    assert traffic.boundary("ddl-cc", state=4, features=2) == 4 * 20 + 2 * 5


def with_wrong_gradient(name: str) -> Any:
    """Return `rewrite_read` with one gradient 1 % too large."""

    def operator(**arguments: Any) -> Any:
        right = arguments[name].detach()
        arguments[name] = right + 1.01 * (arguments[name] - right)
        return functional.rewrite_read(**arguments)

    return operator


def test_the_check_of_an_operator_names_what_is_wrong(
    load: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The number of sequences that the reference computes at a time does not matter."""
    problems, measure = load("ddl.lab.bench.problems"), load("ddl.lab.bench.measure")
    case = problems.Case("rewrite_read", "token", 7, 4, 3, 6)
    problem = problems.build(case)

    def wrong(**arguments: Any) -> Any:
        result = functional.rewrite_read(**arguments)
        return result._replace(gate=result.gate + 1e-3 * arguments["gate_bias"])

    for at_once in (1, 2 * case.time * case.d * case.m, problems.AT_ONCE):
        monkeypatch.setattr(problems, "AT_ONCE", at_once)
        assert 0 < problems.check(case, problem, functional.rewrite_read) < 1
        with pytest.raises(measure.MismatchError, match=r"^output 3: rms error"):
            problems.check(case, problem, wrong)
        for name in ("direction", "norm_weight"):  # per token, and summed over tokens
            with pytest.raises(measure.MismatchError, match=rf"^{name}: rms error"):
                problems.check(case, problem, with_wrong_gradient(name))


def test_a_wrong_model_is_not_timed(
    load: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train_step, plain = load("train_step"), load("ddl.lab.bench.plain")
    right = plain.rewrite

    def wrong(state: Any, direction: Any, value: Any, gate: Any, **options: Any) -> Any:
        return right(state, direction, value, 1.001 * gate, **options)

    monkeypatch.setattr(plain, "rewrite", wrong)
    options = ["--quick", "--no-compile", "--threads", "1", "--variants", "ddl-cc"]
    assert train_step.main([*options, "--out", str(tmp_path)]) == 1
    results = json.loads((tmp_path / "train_step.jsonl").read_text())["results"]
    assert [r["residual"] for r in results if "seconds" in r] == ["additive", "additive"]
    assert all(r["gate"]["red"] for r in results if r["residual"] == "ddl-cc")
    assert "RED" in (tmp_path / "train_step.md").read_text(encoding="utf-8")


def test_a_wrong_operator_is_not_timed(
    load: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ops = load("ops")
    right = reference.rewrite
    monkeypatch.setattr(
        reference, "rewrite", lambda **arguments: right(**arguments | {"eps_k": 0.5})
    )
    options = ["--quick", "--threads", "1", "--ops", "rewrite", "--channels", "4"]
    assert ops.main([*options, "--out", str(tmp_path)]) == 1
    (result,) = json.loads((tmp_path / "ops.jsonl").read_text())["results"]
    assert result["gate"]["red"]
    assert "forward" not in result


def test_gate(load: Any) -> None:
    measure = load("ddl.lab.bench.measure")
    one, two = torch.ones(4), torch.full((4,), 2.0)
    assert measure.compare({"a": (one, one)}, 1e-6) == 0
    assert measure.compare({"a": (one * (1 + 1e-4), one)}, 1e-3) == pytest.approx(1e-4, rel=1e-2)
    for actual in (one * 1.01, one * math.nan, torch.ones(5)):
        with pytest.raises(measure.MismatchError, match=r"^a: "):
            measure.compare({"a": (actual, one)}, 1e-3)
    nearly = one + 1.5e-3  # too far from one, but not relative to `b`
    assert measure.compare({"a": (nearly, one), "b": (two, two)}, 1e-3, {"a": "b"}) < 1e-3


def test_steps_are_interleaved(load: Any) -> None:
    measure = load("ddl.lab.bench.measure")
    order: list[str] = []

    def step(name: str) -> Any:
        def run() -> tuple[float, ...]:
            order.append(name)
            return (float(len(order)),)

        return run

    names = ["a", "b", "c"]
    times = measure.interleave({name: step(name) for name in names}, 6, warmup=1)
    rounds = [order[i : i + 3] for i in range(3, len(order), 3)]
    assert len(rounds) == 6
    assert all(sorted(one) == names for one in rounds)
    assert {one[0] for one in rounds} == set(names)
    followers = {(a, b) for one in rounds for a, b in pairwise(one)}
    assert len(followers) == 6  # each candidate follows each other one
    assert times["a"] == [(float(order.index("a", 3 * k) + 1),) for k in range(1, 7)]


def test_ratio_and_its_interval(load: Any) -> None:
    measure = load("ddl.lab.bench.measure")
    torch.manual_seed(1)
    slow = (2 + 0.1 * torch.randn(40, dtype=torch.float64)).tolist()
    fast = (1 + 0.1 * torch.randn(40, dtype=torch.float64)).tolist()
    low, high = measure.ratio_interval(slow, fast)
    assert low < measure.ratio(slow, fast) < high
    assert low < 2 < high
    assert high - low < 0.3


def test_plain_stream_has_the_state_dict_of_the_fused_one(load: Any) -> None:
    oracle = load("ddl.lab.bench.oracle")
    sizes = {"vocab_size": 16, "num_layers": 1, "num_heads": 2, "hidden_size": 16}
    model = GPT(GPTConfig(residual="ddl-tc", **sizes))
    state, peer = model.state_dict(), oracle.peer(model).state_dict()
    assert state.keys() == peer.keys()
    assert all(state[name].data_ptr() == peer[name].data_ptr() for name in state)


def test_tables_read_well_without_rich(load: Any) -> None:
    table = load("ddl.lab.bench.tables").Table("Title", ("name", "ms"), notes=["A note."])
    table.add("additive", "1.5")
    assert table.markdown() == (
        "### Title\n\n| name     |  ms |\n|----------|----:|\n| additive | 1.5 |\n\nA note.\n"
    )


def test_the_second_step_of_a_turn_is_timed(load: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    train_step, candidates = load("train_step"), load("common.candidates")
    timing = load("ddl.lab.bench.clock").time
    clock, steps = [0.0], iter(range(100))

    def step(*_: Any) -> None:
        clock[0] += 100.0 if next(steps) % 2 == 0 else 1.0

    def read_clock() -> float:
        clock[0] += 0.25
        return clock[0]

    monkeypatch.setattr(train_step, "step", step)
    monkeypatch.setattr(timing, "perf_counter", read_clock)
    model = torch.nn.Linear(1, 1)
    one = candidates.Candidate("additive", "plain", "eager", model, model, hidden_size=4)
    train_step.time_group([one], torch.zeros(1, 2, dtype=torch.long), rounds=3, mode="eager")
    assert one.seconds == [1.25] * 3
