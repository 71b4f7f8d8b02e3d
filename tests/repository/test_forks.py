"""Tests fork processes, which torch allows only as long as nothing stood in for a GPU."""

from __future__ import annotations

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.support.forks import forked


def gradient() -> float:
    x = torch.ones(2, requires_grad=True)
    (3 * x).sum().backward()
    assert x.grad is not None
    return x.grad.sum().item()


def test_a_forked_process_goes_backward_after_fake_tensors() -> None:
    """torch.compile uses these, too; and this process has gone backward before."""
    with FakeTensorMode():
        assert torch.ones(2).shape == (2,)
    assert gradient() == 6
    assert forked(gradient) == 6
