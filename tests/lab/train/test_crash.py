"""Training processes that are killed lose nothing; `make crashtest` kills more of them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import ddl
from tests.support import ROOT


@pytest.mark.parametrize(
    ("kills", "processes", "parallel"),
    [
        (4, 1, "ddp"),
        pytest.param(12, 1, "ddp", marks=pytest.mark.exhaustive),
        pytest.param(2, 2, "fsdp2", marks=pytest.mark.exhaustive),
        pytest.param(5, 2, "ddp", marks=pytest.mark.exhaustive),
        pytest.param(10, 2, "fsdp2", marks=pytest.mark.exhaustive),
    ],
)
def test_killed_runs_resume_to_the_same_end(
    tmp_path: Path, kills: int, processes: int, parallel: str
) -> None:
    command = [sys.executable, "-m", "tests.lab.train.crash", "--kills", str(kills)]
    command += ["--processes", str(processes), "--parallel", parallel]
    environment = os.environ | {
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(Path(ddl.__file__).parents[1]),
    }
    done = subprocess.run(
        [*command, "--folder", str(tmp_path)],
        cwd=ROOT, env=environment, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    counted = re.match(rf"{kills} kills, (\d+) of them inside a checkpoint, \d+ runs", done.stdout)
    assert counted, done.stdout
    assert processes > 1 or int(counted[1]) >= 2
