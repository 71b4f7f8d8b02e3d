"""Environment variables that the Python code reads or sets; docs/environment.md lists all."""

from __future__ import annotations

import os


def wants_traceback() -> bool:
    """Return whether DDL_TRACEBACK is set: commands then show a traceback, not one sentence."""
    return bool(os.environ.get("DDL_TRACEBACK"))


def has_plan() -> bool:
    """Return whether DDL_PLAN is set: kernels are then timed with choices made by hand."""
    return bool(os.environ.get("DDL_PLAN"))


def make_cublas_repeatable() -> None:
    """Set CUBLAS_WORKSPACE_CONFIG, unless the user has, so that cuBLAS sums in a fixed order.

    Call it before cuBLAS is first used: it reads the variable only then.
    """
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


def use_one_tokenizer_thread() -> None:
    """Set TOKENIZERS_PARALLELISM to false, unless the user has set it: processes share the cores.

    Call it before the package tokenizers first encodes: it reads the variable then.
    """
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
