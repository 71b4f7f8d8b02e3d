"""The tests of this folder run on a GPU, and are skipped, with the reason, where there is none.

A GPU that torch sees but the operators cannot use is a failure, not a reason to skip.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.support.gpu_device import DEVICE


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    if not torch.cuda.is_available():
        pytest.skip("these tests need an NVIDIA GPU, and torch finds none")


@pytest.fixture(autouse=True)
def _on_the_gpu() -> Iterator[None]:
    """Tensors and modules are made on the GPU, and float32 products are in float32."""
    torch.set_default_device(DEVICE)
    tf32 = torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.allow_tf32 = False
    yield
    torch.backends.cudnn.allow_tf32 = tf32
    torch.set_default_device(None)
    torch._dynamo.reset()
