"""Count the bytes that kernels read and write in tensors, as if there were no caches."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor

from .build import build_runtime

LINE = 64  # bytes that are counted together; torch's allocations begin at a line


class Traffic:
    """Bytes read and written by kernels since `forget`."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL(str(build_runtime("traffic")))

    def bytes(self, tensor: Tensor) -> tuple[int, int]:
        """Return the bytes read and written of a tensor that begins and ends where lines do."""
        if tensor.data_ptr() % LINE or tensor.nbytes % LINE:
            raise ValueError(
                f"`tensor` must begin and end at multiples of {LINE} bytes, "
                f"got {tensor.nbytes} bytes at {tensor.data_ptr():#x}"
            )
        read, written = ctypes.c_size_t(), ctypes.c_size_t()
        self._library.emulator_traffic(
            ctypes.c_void_p(tensor.data_ptr()),
            ctypes.c_size_t(tensor.nbytes),
            ctypes.byref(read),
            ctypes.byref(written),
        )
        return read.value, written.value

    def forget(self) -> None:
        """Count from zero."""
        self._library.emulator_forget_traffic()


@contextmanager
def traffic() -> Iterator[Traffic]:
    """Yield a counter; kernels must be built with `sanitizer="traffic"`."""
    counted = Traffic()
    counted.forget()
    try:
        yield counted
    finally:
        counted.forget()
