"""The comparison with an earlier run: which rows are slower than allowed, and what is not compared.

Records are written here, so that nothing depends on a time.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ddl.errors import InputError
from ddl.lab.bench.compare import compare, read_baseline, require_sizes
from ddl.lab.bench.row import Row, percentile_95
from ddl.lab.config import BenchConfig

SIZES = {"hidden_size": 64, "dtype": "float32"}


def row(what: str, ratio: float = 2.0, p95: float = 0.6) -> dict[str, Any]:
    return {
        "part": "ops", "what": what, "gate": {"red": None, "worst": 0.1}, "ratio": ratio,
        "p95_over_baseline": p95,
    }  # fmt: skip


def red(what: str) -> dict[str, Any]:
    return {"part": "ops", "what": what, "gate": {"red": "state: rms error", "worst": None}}


def made(*results: dict[str, Any], **fields: Any) -> dict[str, Any]:
    machine = {"cpu": "A", "cores": 2, "simd": "AVX2", "system": "Linux x86_64"}
    return {
        "benchmark": "bench", "machine": machine, "device": "A", "threads": 2, "config": SIZES,
        "results": list(results), **fields,
    }  # fmt: skip


def config(**fields: Any) -> BenchConfig:
    return BenchConfig((), baseline=Path("before"), **fields)


def test_a_run_is_no_slower_than_itself() -> None:
    run = made(row("rewrite forward"), row("rewrite backward"))
    assert compare(run, run, config()) == ([], [])


@pytest.mark.parametrize(("ratio", "regressed"), [(1.81, False), (1.79, True), (9.0, False)])
def test_a_ratio_may_fall_to_the_least(ratio: float, regressed: bool) -> None:
    found, notes = compare(made(row("a", ratio)), made(row("a")), config())
    assert notes == []
    sentence = "ops a: its ratio must be at least 0.9 of 2.000, got 1.790, which is 0.90 of it"
    assert found == [sentence] * regressed


@pytest.mark.parametrize(("p95", "regressed"), [(0.71, False), (0.9, True)])
def test_a_percentile_may_rise_to_the_most(p95: float, regressed: bool) -> None:
    found, _ = compare(made(row("a", p95=p95)), made(row("a")), config())
    sentence = (
        "ops a: its 95th percentile must be at most 1.2 of 0.600 medians of its baseline, got"
        " 0.900, which is 1.50 of it"
    )
    assert found == [sentence] * regressed


def test_the_limits_are_options() -> None:
    run, before = made(row("a", 1.0, 1.2)), made(row("a"))
    assert len(compare(run, before, config()).regressions) == 2
    assert compare(run, before, config(min_ratio=0.5, max_p95=2.0)).regressions == []


def test_every_row_that_regressed_is_named() -> None:
    run = made(row("a", 1.0), row("b"), row("c", 0.5))
    found = compare(run, made(row("c"), row("b"), row("a")), config()).regressions
    assert [sentence.split(":")[0] for sentence in found] == ["ops a", "ops c"]


def test_nan_is_a_regression() -> None:
    found = compare(made(row("a", float("nan"), float("nan"))), made(row("a")), config())
    assert len(found.regressions) == 2


def test_rows_that_the_baseline_lacks_are_named() -> None:
    run = made(row("a"), row("b"), row("c"), red("d"))
    found = compare(run, made(row("a"), red("b"), row("d")), config())
    assert found.regressions == []
    assert found.notes == ["the baseline has no times of ops b, ops c: not compared"]


def test_another_machine_is_named() -> None:
    before = made(row("a"), device="NVIDIA H100", threads=4)
    found = compare(made(row("a")), before, config())
    assert found.notes == [
        "the baseline is of another machine or device (device NVIDIA H100, now A; threads 4, now"
        " 2), whose ratios differ for that reason, too"
    ]


def test_other_sizes_are_refused() -> None:
    require_sizes(made(), SIZES)
    sentence = "^`hidden_size` must be 64 as in the baseline, got 384$"
    with pytest.raises(InputError, match=sentence):
        require_sizes(made(), {"hidden_size": 384, "dtype": "float32"})


def test_the_last_record_of_a_file_is_the_baseline(tmp_path: Path) -> None:
    path = tmp_path / "before.jsonl"
    lines = [made(row("a")), made(row("b")), {"benchmark": "ops", "results": []}]
    text = "\n".join(json.dumps(line) for line in lines)
    path.write_text(text + '\n{"benchmark": "bench", "cut o', encoding="utf-8")
    assert read_baseline(path) == lines[1]


@pytest.mark.parametrize(
    "text",
    ["", "nonsense", "[1, 2]", "[" * 100000, "1" * 5000, '{"benchmark": "ops"}'],
)
def test_what_is_no_record_is_refused(text: str, tmp_path: Path) -> None:
    path = tmp_path / "before.jsonl"
    path.write_text(text, encoding="utf-8")
    sentence = rf"^`baseline` must be a file that `--out` wrote, got {path} without a record"
    with pytest.raises(InputError, match=sentence):
        read_baseline(path)


def test_a_gate_that_compares_nothing_fails() -> None:
    found, notes = compare(made(row("a"), red("b")), made(row("c")), config())
    assert found == ["nothing was compared, because the baseline has times of no such row"]
    assert notes == ["the baseline has no times of ops a: not compared"]


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    sentence = rf"wrote, got {tmp_path}/no: No such file or directory$"
    with pytest.raises(InputError, match=sentence):
        read_baseline(tmp_path / "no")


def test_a_row_in_numbers() -> None:
    seconds, base = [1.0, 2.0, 3.0], [4.0, 4.0, 8.0]
    made = Row(
        "models", "ddl step", "additive", None, 0.2, bytes=4 * 10**9, tokens=6,
        seconds=seconds, baseline_seconds=base, copy_gb_s=4.0,
    ).to_json()  # fmt: skip
    assert made["ratio"] == 2
    assert made["median"] == 2
    assert made["p95"] == pytest.approx(2.9)
    assert made["p95_over_baseline"] == pytest.approx(2.9 / 4)
    assert (made["gb_s"], made["of_copy"], made["tokens_per_second"]) == (2, 0.5, 3)
    assert json.loads(json.dumps(made)) == made


def test_a_red_row_has_no_times() -> None:
    row = Row("ops", "a", "plain PyTorch", "state: rms error", seconds=[1.0], baseline_seconds=[1])
    assert set(row.to_json()) == {"part", "what", "baseline", "gate"}


def test_the_percentile() -> None:
    assert percentile_95([3.0]) == 3
    assert percentile_95([float(i) for i in range(101)]) == 95
