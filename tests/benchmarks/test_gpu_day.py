"""The calls on a GPU, in small on a CPU: their records, what fails, what a killed one leaves."""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.benchmarks.test_benchmarks import BENCHMARKS, load
from tests.support import ROOT

__all__ = ["load"]  # a fixture
DAY = [str(BENCHMARKS / "gpu" / "day.sh")]
ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1"}


def run(number: int, out: Path, *options: str, status: int = 0) -> tuple[list[Any], str]:
    """The records of a call, and its output."""
    command = [*DAY, str(number), "--device", "cpu", "--out", str(out), *options]
    done = subprocess.run(command, capture_output=True, text=True, env=ENVIRONMENT, timeout=300)
    assert done.returncode == status, done.stdout + done.stderr
    return records(out / f"gpu-{number}.jsonl"), done.stdout


def records(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()]


def of(lines: list[Any], part: str) -> list[Any]:
    return [line for line in lines if line["part"] == part]


def test_the_checks(tmp_path: Path) -> None:
    lines, said = run(1, tmp_path, "--pieces", "1")
    (smoke,) = of(lines, "smoke")
    assert smoke["gate"]["red"] is None
    assert 0 <= smoke["gate"]["worst"] <= 1
    (tests,) = of(lines, "tests")
    assert tests["tests"]["passed"] >= 4
    assert tests["status"] == 0
    ended = "; nothing failed; not run: capture all: needs a GPU, large all: needs a GPU, sanitize"
    assert ended in said.splitlines()[-1]
    assert str(ROOT) not in json.dumps(lines)


def test_the_operators(tmp_path: Path) -> None:
    options = ["--only", "copy,ops,trace,launch,others", "--pieces", "3", "--commit", "abc"]
    lines, said = run(2, tmp_path, *options)
    for line in lines:
        assert line["torch"] == torch.__version__
        assert line["commit"] == {"hash": "abc", "dirty": False}
        assert line["device"]
        assert "driver" in line
        assert len(line["native"]) == 12
    counts = {
        part: len(list(group)) for part, group in itertools.groupby(lines, lambda x: x["part"])
    }
    assert counts == {
        "machine": 1, "copy": 3, "ops": 3, "trace": 3, "launch": 2 + 4 * 3, "others": 3,
    }  # fmt: skip
    for line in of(lines, "ops"):
        assert line["gate"]["red"] is None
        for half in ("copy", "forward", "backward"):
            part = line[half]
            assert len(part["seconds"]) == 2
            assert part["gb_s"] == pytest.approx(part["bytes"] / part["median"] / 1e9)
    wide = of(lines, "ops")[0]
    assert (wide["op"], wide["form"], wide["d"], wide["m"]) == ("rewrite_read", "channel", 32, 4)
    row = 2 * 12 * 32 * 2  # bytes
    assert wide["forward"]["bytes"] == row * 10
    assert wide["backward"]["bytes"] == row * 15
    for line in of(lines, "trace"):
        assert line["kernels_us"]["ddl::rewrite_read"] > 0
    assert all(line["us"] > 0 for line in of(lines, "launch"))
    assert "| rewrite_read | token " in said
    ours, *missing = of(lines, "others")
    assert ours["one_row_us"]["no grad"] > 0
    assert all("skipped" in line for line in missing)
    assert "Liger is left out: " in said
    ended = "; nothing failed; not run: others the authors' Triton code: give --authors FOLDER"
    assert ended in said.splitlines()[-1]


@pytest.mark.exhaustive
def test_the_models_and_plans(tmp_path: Path) -> None:
    options = ["--only", "train,prefill,decode,plans", "--pieces", "2"]
    lines, said = run(3, tmp_path, *options)
    assert [line["residual"] for line in of(lines, "train")] == ["additive", "ddl-tc"] * 2
    for part in ("prefill", "decode"):
        assert [line["residual"] for line in of(lines, part)] == ["additive", "ddl-tc"]
    own, other = of(lines, "plans")
    assert "plan" not in own
    assert other["plan"] == "FEATURES=4 THREADS=64 BLOCKS=8 SUMS=0"
    assert f"| {other['plan']} | backward |" in said


def test_a_killed_call_leaves_its_records(tmp_path: Path) -> None:
    command = [*DAY, "2", "--device", "cpu", "--out", str(tmp_path), "--only", "launch,ops"]
    path = tmp_path / "gpu-2.jsonl"
    with subprocess.Popen(command, env=ENVIRONMENT, start_new_session=True) as process:
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline and not (path.exists() and len(records(path)) >= 3):
            time.sleep(0.02)
        os.killpg(process.pid, signal.SIGKILL)
    left = records(path)
    assert [line["part"] for line in left[:3]] == ["machine", "ops", "ops"]
    assert len(left) < 13
    assert all("forward" in line for line in of(left, "ops"))
