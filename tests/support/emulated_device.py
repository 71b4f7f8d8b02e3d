"""The emulated GPU for tests of the operators: in `emulated()`, CPU tensors run the CUDA kernels.

Everything but the driver is the same as on a GPU: the operators, the choice of a specialisation and
its plan, the packing of arguments, the kernels' source.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from ddl import _native
from tests.emulator.build import KERNELS, build, unsupported

# "asan" or "tsan" in a process started by tests/emulated_gpu/test_sanitized.py.
SANITIZER = os.environ.get("DDL_TEST_SANITIZER", "")


def why_not() -> str | None:
    """Return the reason for having no emulated GPU on this machine or build, or None."""
    if not hasattr(_native, "emulate"):
        return "the extension was built without the cargo feature `emulator` (make setup has it)"
    return unsupported()


needs_emulator = pytest.mark.skipif(why_not() is not None, reason=str(why_not()))


@contextmanager
def emulated(
    *,
    kernels: Path = KERNELS,
    plan: dict[str, int] | None = None,
    multiprocessors: int = 2,
    shared_per_block: int = 65_536,
    cluster: int = 1,
    sanitizer: str = SANITIZER,
) -> Iterator[None]:
    """Run CPU tensors on the emulated GPU.

    cluster: most blocks that may share a token; 1 for a GPU without clusters.
    plan: overrides, by the names of the macros.
    """
    _native.emulate(
        functools.partial(_build, kernels, sanitizer),
        multiprocessors=multiprocessors,
        shared_per_block=shared_per_block,
        cluster=cluster,
        plan=plan,
    )
    try:
        yield
    finally:
        _native.emulate(None)


def _build(kernels: Path, sanitizer: str, source: str, defines: Sequence[str]) -> str:
    return str(build(kernels / f"{source}.cu", defines, sanitizer))
