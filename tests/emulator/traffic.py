"""Bytes that kernels read and write of tensors, as the text asks for them; there are no caches."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from torch import Tensor

from .build import build_runtime


class Traffic:
    """By name, what has been read and written since the tensors are watched."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL(str(build_runtime("traffic")))
        self._names: list[str] = []

    def watch(self, tensors: Mapping[str, Tensor | None]) -> None:
        """Counts what happens to these tensors from now on; None for those that are absent."""
        for name, tensor in tensors.items():
            if tensor is not None:
                self._names.append(name)
                start, size = ctypes.c_void_p(tensor.data_ptr()), ctypes.c_size_t(tensor.nbytes)
                self._library.emulator_watch(start, size)

    def bytes(self) -> dict[str, tuple[int, int]]:
        """Read and written, by name."""
        return {name: self._bytes(i) for i, name in enumerate(self._names)}

    def _bytes(self, index: int) -> tuple[int, int]:
        read, written = ctypes.c_size_t(), ctypes.c_size_t()
        self._library.emulator_traffic(
            ctypes.c_size_t(index), ctypes.byref(read), ctypes.byref(written)
        )
        return read.value, written.value

    def forget(self) -> None:
        """Watches nothing any more."""
        self._library.emulator_watch_nothing()
        self._names.clear()


@contextmanager
def traffic() -> Iterator[Traffic]:
    """Kernels must be built with "traffic" for a sanitizer."""
    counted = Traffic()
    try:
        yield counted
    finally:
        counted.forget()
