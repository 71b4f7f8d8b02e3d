"""The tests of this folder run on a GPU. Without one they are skipped, with the reason.

If torch sees a GPU but the operators cannot use it, they fail.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch

from tests.support.gpu_device import DEVICE


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    if not torch.cuda.is_available():
        pytest.skip("these tests need an NVIDIA GPU, and torch finds none")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call() -> Iterator[None]:
    """Skip sizes that `DDL_PLAN` leaves without a plan: the suite is also run with overrides."""
    try:
        return (yield)
    except ValueError as error:
        if "DDL_PLAN" in os.environ and "leaves no plan" in str(error):
            pytest.skip(str(error))
        raise


@pytest.fixture(autouse=True)
def _on_the_gpu() -> Iterator[None]:
    """Create tensors and modules on the GPU by default, and disable TF32 in cuDNN."""
    torch.set_default_device(DEVICE)
    tf32 = torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.allow_tf32 = False
    yield
    torch.backends.cudnn.allow_tf32 = tf32
    torch.set_default_device(None)
    torch._dynamo.reset()
