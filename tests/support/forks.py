"""Forked test processes: what their parent must not have done."""

from __future__ import annotations

import os
import pickle
import traceback
from collections.abc import Callable
from typing import TypeVar

import torch

T = TypeVar("T")

# Stands in for the GPU that a machine lacks. FakeTensorMode calls it, which torch.compile uses.
pretend_gpu: Callable[[], None] = torch._C._ensureCUDADeviceGuardSet


def keep_backwards_forkable() -> None:
    """Let forked processes go backward, also after torch.compile.

    Once something stands in for a GPU, the next backward starts a thread for it, and from then on
    torch refuses backwards in forked processes. Only tensors of a fake GPU need it: they call
    `pretend_gpu`, in a process of their own (`forked`).
    """
    if not torch.cuda.is_available():
        torch._C._ensureCUDADeviceGuardSet = lambda: None


def forked(make: Callable[[], T]) -> T:
    """The result of `make` in a forked process, whose errors are printed."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            os.close(read)
            with os.fdopen(write, "wb") as pipe:
                pickle.dump(make(), pipe)
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)
    os.close(write)
    with os.fdopen(read, "rb") as pipe:
        made = pipe.read()
    assert os.waitpid(child, 0)[1] == 0, "the forked process failed"
    result: T = pickle.loads(made)
    return result
