"""Run the kernels of faults.cu.

As a program, run one of them in a process of its own, as sanitizers need it. It does not import
torch, which would take longer than everything else:

    python -m emulator.faults LIBRARY KERNEL [INDEX]
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Sequence
from pathlib import Path

from .launch import LaunchError, Module

SOURCE = Path(__file__).with_name("faults.cu")
MOST_THREADS = 1024
DEFINES = (f"THREADS={MOST_THREADS}",)
UNWRITTEN = -5.0


class Argument(ctypes.Structure):
    """The argument of every kernel in faults.cu."""

    _fields_ = (("out", ctypes.c_void_p), ("index", ctypes.c_longlong))


def line_of(text: str) -> int:
    """Return the number of the only line of faults.cu that contains `text`."""
    lines = SOURCE.read_text(encoding="utf-8").splitlines()
    (number,) = (i for i, line in enumerate(lines, start=1) if text in line)
    return number


def run(
    module: Module,
    kernel: str,
    index: int = 0,
    *,
    grid: Sequence[int] = (1,),
    block: Sequence[int] = (128,),
    size: int = 1024,
    fill: float = UNWRITTEN,
    shared_bytes: int = 4096,
) -> list[float]:
    """Run a kernel on `size` floats with the value `fill`, and return them."""
    out = (ctypes.c_float * size)(*[fill] * size)
    argument = Argument(ctypes.addressof(out), index)
    module.launch(kernel, grid, block, argument, shared_bytes)
    return list(out)


def main() -> None:
    library, kernel, *index = sys.argv[1:]
    module = Module(Path(library))
    out = (ctypes.c_float * 1024)()
    argument = Argument(ctypes.addressof(out), *map(int, index))
    try:
        # Three blocks, so that two of them can race. In the second launch each thread writes other
        # elements of `out`, which is no race, because launches are ordered.
        for threads in (128, 64):
            module.launch(kernel, (3,), (threads,), argument, 4096)
    except LaunchError as error:
        run(module, "sum_of_block")  # works after an error
        sys.exit(str(error))


if __name__ == "__main__":
    main()
