"""The environment variables that Python code here reads or sets; docs/environment.md lists all."""

from __future__ import annotations

import os


def wants_traceback() -> bool:
    """DDL_TRACEBACK: the commands show where an error came from instead of one sentence."""
    return bool(os.environ.get("DDL_TRACEBACK"))


def make_cublas_repeatable() -> None:
    """CUBLAS_WORKSPACE_CONFIG: sums in a fixed order, unless the user has chosen a workspace.

    cuBLAS reads it when it is first used.
    """
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
