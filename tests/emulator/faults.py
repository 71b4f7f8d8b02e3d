"""Runs the kernels of faults.cu.

As a program it runs one of them in a process of its own, as sanitizers need it; without torch,
which would take longer to load than all the rest:

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
    """What every kernel of faults.cu takes."""

    _fields_ = (("out", ctypes.c_void_p), ("index", ctypes.c_longlong))


def line_of(text: str) -> int:
    """The number of the one line of faults.cu that holds a text."""
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
    """Runs a kernel on `size` floats that hold `fill`, and returns them."""
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
        # Three blocks, so that two of them can race. The second launch gives each thread other
        # elements of `out`: that is no race, as launches follow one another.
        for threads in (128, 64):
            module.launch(kernel, (3,), (threads,), argument, 4096)
    except LaunchError as error:
        run(module, "sum_of_block")  # goes on after an error
        sys.exit(str(error))


if __name__ == "__main__":
    main()
