"""Environment variables that the Python code reads or sets; docs/environment.md lists all."""

from __future__ import annotations

import os
from pathlib import Path

# Variables of ours with an effect outside the tests; docs/environment.md says which.
OURS = (
    "DDL_CACHE_DIR",
    "DDL_LOG",
    "DDL_TRACEBACK",
    "DDL_PLAN",
    "DDL_SIMD",
    "DDL_THREADS",
)
OF_THE_TESTS = ("DDL_TEST_", "DDL_EMULATOR_")
# How many threads torch and the operators have, and how these wait.
THREADS = (
    "OMP_NUM_THREADS",
    "OMP_WAIT_POLICY",
    "OMP_PROC_BIND",
    "OMP_PLACES",
    "GOMP_CPU_AFFINITY",
    "KMP_AFFINITY",
    "MKL_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
)


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


def to_report() -> dict[str, str]:
    """The variables that a report may show: ours and those of threads, if they are set.

    No others, because a report is pasted into issues.
    """
    return {name: os.environ[name] for name in (*OURS, *THREADS) if name in os.environ}


def unknown() -> list[str]:
    """Names of variables that begin as ours do and are none of this version, sorted."""
    ours = [name for name in os.environ if name.startswith("DDL_") and name not in OURS]
    return sorted(name for name in ours if not name.startswith(OF_THE_TESTS))


def cache_directory() -> Path | None:
    """The directory of compiled kernels, as src/environment.rs chooses it; None if there is none.

    DDL_CACHE_DIR, else `ddl` in the user's cache directory.
    """
    if os.environ.get("DDL_CACHE_DIR"):
        return Path(os.environ["DDL_CACHE_DIR"])
    caches = os.environ.get("XDG_CACHE_HOME", "")
    if os.path.isabs(caches):
        return Path(caches) / "ddl"
    try:
        return Path.home() / ".cache" / "ddl"
    except RuntimeError:  # no home directory is known
        return None
