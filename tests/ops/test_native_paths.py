"""Native code paths chosen by environment variables: instruction sets, rayon's threads."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from ddl import functional

TESTS = Path(__file__).parent
SUBSET = "(test_rewrite_read and 63) or test_expand or test_any_mix or threads or bit_for_bit"


@pytest.mark.table(0)
@pytest.mark.parametrize("path", ["DDL_SIMD=portable", "DDL_SIMD=avx2", "DDL_THREADS=rayon"])
def test_operators_on(path):
    name, _, choice = path.partition("=")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-n", "0"]
    run = subprocess.run(
        [*command, "-k", SUBSET, str(TESTS / "test_ops.py")],
        env=os.environ | {name: choice},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert run.returncode == 0, run.stdout[-3000:]


@pytest.mark.skipif("DDL_TEST_LARGE" not in os.environ, reason="needs 16 GB; set DDL_TEST_LARGE=1")
def test_more_than_two_to_the_31_elements():
    d, m = 4096, 4
    tokens = 2**31 // (d * m) + 5
    state = torch.zeros(tokens, d, m, dtype=torch.bfloat16)
    state[-3:] = torch.randn(3, d, m)
    direction = torch.zeros(tokens, d, dtype=torch.bfloat16)
    direction[-3:] = torch.randn(3, d)
    value, gate = torch.zeros(tokens, m), torch.ones(tokens)
    new = functional.rewrite(state, direction, value, gate, eps_k=1e-3)
    tail = functional.rewrite(state[-3:], direction[-3:], value[-3:], gate[-3:], eps_k=1e-3)
    assert state.numel() > 2**31
    assert torch.equal(new[-3:], tail)
    assert not new[:-3].any()
