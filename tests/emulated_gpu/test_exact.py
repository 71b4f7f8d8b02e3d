"""The contracts of tests/ops/test_exact.py on the emulated GPU, bit for bit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.emulator.build import KERNELS
from tests.ops import test_exact
from tests.support.emulated_device import emulated, needs_emulator
from tests.support.op_cases import BF16, F16, F32

pytestmark = needs_emulator

# The same division for all kernels, so that rewrite_read, rewrite and read add in the same order.
SAME_ORDER = {"CHUNK": 7, "THREADS": 32, "FEATURES": 1}


@pytest.mark.table(0)
@pytest.mark.parametrize("dtype", [BF16, F32, F16], ids=str)
@pytest.mark.parametrize(("m", "compress"), [(4, "token"), (1, "identity"), (4, "channel")])
def test_rewrite_then_read(dtype, m, compress):
    check_bits(dtype, m, compress)


def check_bits(dtype: torch.dtype, m: int, compress: str, kernels: Path = KERNELS) -> None:
    """Raise AssertionError if `rewrite_read` and `rewrite`, then `read`, differ in any bit."""
    with emulated(kernels=kernels, plan=SAME_ORDER):
        test_exact.test_outputs_of_rewrite_then_read(dtype, m, compress)
        test_exact.test_parameter_gradients_of_rewrite_then_read(dtype, m, compress, {})
        test_exact.test_every_gradient_of_rewrite_then_read(dtype, m, compress, ("context",))
        test_exact.test_forward_and_backward_read_the_same_x(dtype, m, compress)
