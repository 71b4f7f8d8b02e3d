"""Count the bytes that kernels read and write in tensors, as if there were no caches."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from torch import Tensor

from .build import build_runtime


class Traffic:
    """Bytes read and written by tensor name, since `watch`."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL(str(build_runtime("traffic")))
        self._names: list[str] = []

    def watch(self, tensors: Mapping[str, Tensor | None]) -> None:
        """Count accesses to these tensors from now on; None stands for an absent tensor."""
        for name, tensor in tensors.items():
            if tensor is not None:
                self._names.append(name)
                start, size = ctypes.c_void_p(tensor.data_ptr()), ctypes.c_size_t(tensor.nbytes)
                self._library.emulator_watch(start, size)

    def bytes(self) -> dict[str, tuple[int, int]]:
        """Return bytes read and written, by name."""
        return {name: self._bytes(i) for i, name in enumerate(self._names)}

    def _bytes(self, index: int) -> tuple[int, int]:
        read, written = ctypes.c_size_t(), ctypes.c_size_t()
        self._library.emulator_traffic(
            ctypes.c_size_t(index), ctypes.byref(read), ctypes.byref(written)
        )
        return read.value, written.value

    def forget(self) -> None:
        """Stop watching all tensors."""
        self._library.emulator_watch_nothing()
        self._names.clear()


@contextmanager
def traffic() -> Iterator[Traffic]:
    """Yield a counter; kernels must be built with `sanitizer="traffic"`."""
    counted = Traffic()
    try:
        yield counted
    finally:
        counted.forget()
