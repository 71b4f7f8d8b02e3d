"""The calls on a GPU, in small on a CPU and an emulated GPU: records, failures, a killed call."""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.benchmarks.test_benchmarks import BENCHMARKS, load
from tests.support import ROOT
from tests.support.emulated_device import needs_emulator

__all__ = ["load"]  # a fixture
EMULATED = pytest.param("emulated", marks=[needs_emulator, pytest.mark.exhaustive])
DAY = [str(BENCHMARKS / "gpu" / "day.sh")]
COUNTS = {
    "machine": 1, "smoke": 1, "bits": 8, "compiled": 3, "steps": 2, "roof": 1, "operators": 6,
    "plans": 1, "chains": 2, "bfloat16": 2, "counters": 1, "generation": 4, "launch": 2 + 4 * 3,
}  # fmt: skip


def records(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()]


def of(lines: list[Any], part: str) -> list[Any]:
    return [line for line in lines if line["part"] == part]


@pytest.mark.parametrize("device", ["cpu", EMULATED])
def test_day_in_small(device: str, tmp_path: Path) -> None:
    command = [*DAY, "day", "--device", device, "--out", str(tmp_path), "--commit", "abc"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = records(tmp_path / "gpu-day.jsonl")
    groups = itertools.groupby(lines, lambda line: line["part"])
    assert {part: len(list(group)) for part, group in groups} == COUNTS
    for line in lines:
        assert (line["torch"], line["commit"]["hash"]) == (torch.__version__, "abc")
        assert line.get("gate", {}).get("red") is None
    assert str(ROOT) not in json.dumps(lines)
    ended = "failed: nothing; not run: roof all: needs a GPU, counters all: needs a GPU"
    assert done.stdout.splitlines()[-1].endswith(ended)

    additive, ours = of(lines, "steps")
    assert additive["ratio"] == additive["same_ratio"] == 1
    assert ours["ratio"] == pytest.approx(additive["median"] / ours["median"])
    assert ours["gate"]["worst"] < 1e-4
    assert 0 < ours["gate"]["drift"] < 0.15
    assert 0 < ours["floor"] < 1
    assert (ours["anchor_every"], ours["default"], ours["erase"]) == (8, True, "tied")
    assert len(ours["seconds"]) == 5 * 3
    _, half = of(lines, "bfloat16")
    assert (half["residual"], half["same_ratio"]) == ("additive", 1)
    assert half["ratio"] != 1

    wide = of(lines, "operators")[1]
    assert (wide["form"], wide["d"], wide["m"], wide["state"]) == ("channel", 64, 4, "bfloat16")
    row = 2 * 12 * 64 * 2  # bytes
    assert [wide[half]["bytes"] for half in ("forward", "backward")] == [row * 10, row * 15]
    assert len(wide["forward"]["seconds"]) == 2
    assert of(lines, "plans")[0]["plan"] == "ORDER=0"
    none, two = of(lines, "chains")
    assert two["backward"]["bytes"] - none["backward"]["bytes"] == 2 * row
    assert "| rewrite_read | channel | 64 |" in done.stdout


def test_killed_call_leaves_its_records(tmp_path: Path) -> None:
    command = [*DAY, "day", "--device", "cpu", "--out", str(tmp_path), "--only", "operators,launch"]
    path = tmp_path / "gpu-day.jsonl"
    with subprocess.Popen(command, start_new_session=True) as process:
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline and not (path.exists() and len(records(path)) >= 3):
            time.sleep(0.02)
        os.killpg(process.pid, signal.SIGKILL)
    left = records(path)
    assert [line["part"] for line in left[:3]] == ["machine", "operators", "operators"]
    assert len(left) < 1 + 6 + 14


def test_record_where_torch_cannot_be_imported(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise OSError('libcudart.so.13: no such file')\n")
    command = [sys.executable, "-m", "gpu", "day", "--out", str(tmp_path), "--only", "launch"]
    path = os.pathsep.join(map(str, (tmp_path, ROOT / "python", BENCHMARKS)))
    environment = os.environ | {"PYTHONPATH": path}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=60)
    assert done.returncode == 1, done.stderr
    reasons = [line["error"] for line in records(tmp_path / "gpu-day.jsonl")]
    assert reasons == ["OSError: libcudart.so.13: no such file"] * 2
    assert "; failed: machine start, launch launch; not run: " in done.stdout.splitlines()[-1]


def test_unknown_part_is_refused(load: Any, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        load("gpu.__main__").main(["day", "--device", "cpu", "--only", "steps,trian"])
    assert stopped.value.code == 2
    expected = "--only must name parts among machine, smoke, bits, compiled, steps, anchors,"
    assert expected in capsys.readouterr().err


def test_words_of_the_second_call_select_tests(load: Any) -> None:
    """The three compiled models, and each layout of the delta rule in two dtypes."""
    chosen = [f"({words})" for _, words in load("gpu.day").TESTS]
    files = ["tests/gpu/test_models.py", "tests/gpu/test_delta_rule.py"]
    command = [sys.executable, "-m", "pytest", "--all", "--collect-only", "-q", *files]
    command += ["-k", " or ".join(chosen)]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True).stdout
    names = [line for line in listed.splitlines() if "::test_" in line]
    assert sum("test_models" in name for name in names) == 3
    assert all("compiled" in name for name in names if "test_models" in name)
    assert sum("feature-" in name and "float16" in name for name in names) == len(names) - 3 == 24


@pytest.mark.parametrize(("mib", "status"), [(1, 0), (65, 1)])
def test_luggage_of_prepare_is_limited(mib: int, status: int, tmp_path: Path) -> None:
    """With a stand-in for Python, which builds a wheel of this size."""
    script = tmp_path / "benchmarks" / "gpu" / "day.sh"
    python = tmp_path / ".venv" / "bin" / "python"
    for file in (script, python):
        file.parent.mkdir(parents=True)
    script.write_bytes(Path(DAY[0]).read_bytes())
    build = f"mkdir -p wheels && head -c {mib << 20} /dev/zero > wheels/a.whl"
    python.write_text(f"#!/bin/bash\nif [[ $2 == maturin ]]; then {build}; fi\n")
    (tmp_path / "Makefile").write_text("setup:\n")
    python.chmod(0o755)
    done = subprocess.run(["bash", str(script), "prepare"], capture_output=True, text=True)
    assert done.returncode == status, done.stderr
    assert ("at most 64 may travel" in done.stderr) == bool(status)
