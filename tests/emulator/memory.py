"""Tensors laid out so that accesses out of bounds fault."""

from __future__ import annotations

import ctypes
import math
import mmap
from collections.abc import Sequence

import torch
from torch import Tensor

_PAGE = mmap.PAGESIZE
_PROT_NONE = 0  # the mmap module lacks it
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


def guarded(shape: Sequence[int], dtype: torch.dtype, alignment: int = 16) -> Tensor:
    """Return a tensor between pages that fault, filled with bytes of 0xFF.

    An access beyond the end faults, which the emulator turns into a launch error. Elements read
    before they are written are NaN, or -1 in integers.

    alignment: of the first element, in bytes. If it does not divide the tensor's size, up to
        alignment - 1 bytes lie between the end and the page that faults. With the element's size
        there are none, and the first element has no larger alignment.
    """
    count = math.prod(shape)
    if count == 0:
        return torch.empty(tuple(shape), dtype=dtype)
    size = count * dtype.itemsize
    body = -(-size // _PAGE) * _PAGE
    memory = mmap.mmap(-1, _PAGE + body + _PAGE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory[_PAGE : _PAGE + body] = b"\xff" * body
    start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    for page in (start, start + _PAGE + body):
        if _libc.mprotect(page, _PAGE, _PROT_NONE):
            raise OSError(ctypes.get_errno(), "mprotect failed")
    offset = _PAGE + body - -(-size // alignment) * alignment
    # The tensor keeps `memory` and its pages alive.
    return torch.frombuffer(memory, dtype=dtype, count=count, offset=offset).view(tuple(shape))


def guarded_copy(tensor: Tensor, alignment: int = 16) -> Tensor:
    """Return a contiguous copy of a tensor in guarded memory."""
    return guarded(tensor.shape, tensor.dtype, alignment).copy_(tensor.detach())
