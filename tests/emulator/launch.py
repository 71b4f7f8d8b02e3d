"""Run kernels that `build` compiled."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from pathlib import Path


class LaunchError(RuntimeError):
    """A launch that a GPU would refuse, or that has undefined behaviour."""


class Module:
    """The kernels of one shared object."""

    def __init__(self, path: Path) -> None:
        self._library = ctypes.CDLL(str(path))

    def launch(
        self,
        kernel: str,
        grid: Sequence[int],
        block: Sequence[int],
        argument: ctypes.Structure,
        shared_bytes: int = 0,
    ) -> None:
        """Run a grid of blocks, each of up to three dimensions.

        argument: laid out like the kernel's parameter.

        Raises LaunchError, or TypeError if the size of `argument` is not the parameter's.
        """
        expected = self.argument_bytes(kernel)
        if ctypes.sizeof(argument) != expected:
            raise TypeError(
                f"`argument` of {kernel} must have {expected} bytes, got {ctypes.sizeof(argument)}."
            )
        parameters = (ctypes.c_void_p * 1)(ctypes.addressof(argument))
        error = ctypes.create_string_buffer(4096)
        failed = self._library[f"ddl_emulated_{kernel}"](
            _three(grid),
            _three(block),
            ctypes.c_size_t(shared_bytes),
            parameters,
            error,
            ctypes.c_size_t(len(error)),
        )
        if failed:
            raise LaunchError(error.value.decode(errors="replace"))

    def argument_bytes(self, kernel: str) -> int:
        """Return the size of a kernel's parameter."""
        size = self._library[f"ddl_emulated_{kernel}_argument_bytes"]
        size.restype = ctypes.c_size_t
        return int(size())


def _three(sizes: Sequence[int]) -> ctypes.Array[ctypes.c_uint]:
    return (ctypes.c_uint * 3)(*sizes, *[1] * (3 - len(sizes)))
