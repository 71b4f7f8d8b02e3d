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
from tests.support.emulated_device import needs_emulator

pytestmark = needs_emulator

TESTS = Path(__file__).parent
SAMPLE = [
    "test_rewrite_read and 100-torch.float32",
    "test_expand and 4-4-torch.float32",
    "test_no_access",
    "test_unaligned and float32",
    "test_any_plan and 96 and window1",
    "test_halos and 4-5",
    "test_rows_that_travel and 4-token-torch.float32",
    "test_blocks_of_any and 9-",
    "test_blocks_of_a_cluster and 100-4-torch.float32",
    "test_rows_that_travel_ahead_to_a_cluster and 4-token-1-1",
]


def of_sample(expression: str) -> list[str]:
    files = (TESTS / "test_ops.py", TESTS / "test_cluster.py")
    return ["-p", "no:cacheprovider", "-n", "0", "-k", expression, *map(str, files)]


@pytest.mark.parametrize("clause", SAMPLE)
def test_sample_is_of_something(clause):
    listed = [sys.executable, "-m", "pytest", "-q", "--collect-only", *of_sample(clause)]
    run = subprocess.run(listed, capture_output=True, text=True, timeout=120, check=False)
    assert run.returncode == 0, run.stdout[-3000:] + run.stderr[-3000:]


@pytest.mark.parametrize("sanitizer", ["asan", "tsan"])
def test_sample(sanitizer):
    sample = " or ".join(f"({clause})" for clause in SAMPLE)
    environment = {
        **os.environ,
        **sanitizer_environment(sanitizer),
        "DDL_TEST_SANITIZER": sanitizer,
        "DDL_EMULATOR_ORDER": "3",
    }
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", *of_sample(sample)],
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
