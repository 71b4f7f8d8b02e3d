"""A sample of the operators on the emulated GPU under AddressSanitizer and ThreadSanitizer.

A running Python cannot load a sanitizer, so the sample runs in a process of its own.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.emulator.build import sanitizer_environment
from tests.support import ROOT
from tests.support.emulated_device import needs_emulator

pytestmark = needs_emulator

HERE = Path(__file__).parent
FILES = [str(HERE / f"test_{name}.py") for name in ("ops", "cluster", "rewrites", "tiles")]
FILES += [f"tests/ops/test_{name}.py" for name in ("chain", "cached", "documents")]
# Clauses for pytest's -k. Compiling a kernel for a sanitizer takes seconds, so `make test` runs the
# first of them and `make test-all` every one.
SAMPLE = [
    "test_clusters_of_any_number and torch.float32-9-2-2",
    "test_rows_that_travel and 4-token-torch.float32 and keep0-stages1",
    "test_no_access and 63-3 and channel",
    "same_bits_on_a_gpu and one and 4-token-torch.float32",
    "test_rewrite_read and 100-torch.float32",
    "test_expand and 4-4-torch.float32",
    "test_no_access",
    "test_unaligned and float32",
    "test_any_plan and 96 and window-1",
    "test_halos and 4-5",
    "test_rows_that_travel and 4-token-torch.float32",
    "test_blocks_of_any and 9-",
    "test_blocks_of_a_cluster and 100-4-torch.float32",
    "test_rows_that_travel_ahead_to_a_cluster and 4-token-1-1",
    "same_bits_on_a_gpu and 3-token-torch.bfloat16",
    "whole_is_on_a_gpu and memory and 4-4-torch.float32",
    "same_bits_on_a_gpu and 4-channel-torch.float32",
    "reads_on_a_gpu and some and 4-4-torch.float32",
    "expansions_on_a_gpu and some and torch.float32",
    "test_rewrites and test_rewrite_read and 3-4-token-torch.float32",
    "test_tiles and test_any_order_of_threads and 5",
]
FEW = 1

# All clauses are collected in one process: importing torch takes longer than collecting.
COLLECT = """
import sys, pytest
*files, clauses = sys.argv[1:]
for clause in clauses.splitlines():
    options = ["-q", "--collect-only", "-p", "no:cacheprovider", "-n", "0", "--all", "-k", clause]
    if pytest.main([*options, *files]):
        sys.exit(f"no test is chosen by {clause!r}")
"""


@pytest.mark.exhaustive
def test_every_clause_chooses_a_test():
    command = [sys.executable, "-c", COLLECT, *FILES, "\n".join(SAMPLE)]
    run = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=240, check=False
    )
    assert run.returncode == 0, run.stdout[-3000:] + run.stderr[-3000:]


@pytest.mark.table(0)
@pytest.mark.parametrize("sanitizer", ["tsan", "asan"])
@pytest.mark.parametrize(
    "sample",
    [SAMPLE[:FEW], pytest.param(SAMPLE[FEW:], marks=pytest.mark.exhaustive)],
    ids=["few", "rest"],
)
def test_sample(sanitizer, sample):
    expression = " or ".join(f"({clause})" for clause in sample)
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-n", "0"]
    environment = {
        **os.environ,
        **sanitizer_environment(sanitizer),
        "DDL_TEST_SANITIZER": sanitizer,
        "DDL_EMULATOR_ORDER": "3",
        "OMP_NUM_THREADS": "1",  # torch's own parallel regions look like races
    }
    run = subprocess.run(
        [*command, "--all", "-k", expression, *FILES],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    if "unexpected memory mapping" in run.stderr:
        pytest.skip("this kernel's address space randomisation is too wide for ThreadSanitizer")
    assert run.returncode == 0, run.stdout[-3000:] + run.stderr[-5000:]
    assert " passed" in run.stdout
