"""Environment variables that the Python code reads or sets; docs/environment.md lists all."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

from ddl.errors import InputError
from ddl.paths import at_home

# Variables of ours with an effect outside the tests; docs/environment.md says which.
OURS = (
    "DDL_ACCELERATE_DELTA_RULE",
    "DDL_CACHE_DIR",
    "DDL_LOG",
    "DDL_TRACEBACK",
    "DDL_PLAN",
    "DDL_SIMD",
    "DDL_THREADS",
)
OF_THE_TESTS = ("DDL_TEST_", "DDL_EMULATOR_")
# How many threads torch and the operators have, and how these wait.
OF_THREADS = ("OMP_", "GOMP_", "KMP_AFFINITY", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
# torchrun sets these in each process that it starts.
OF_TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK")


class Launched(NamedTuple):
    """A process that torchrun has started: its number, how many there are, its number here."""

    rank: int
    processes: int
    local_rank: int


def launched() -> Launched | None:
    """Return how torchrun has started this process; None if something else has."""
    values = [os.environ[name] for name in OF_TORCHRUN if name in os.environ]
    return Launched(*map(int, values)) if len(values) == len(OF_TORCHRUN) else None


def restarts() -> int:
    """How often torchrun has started the processes again; 0 on several machines, where the
    torchruns may count differently."""
    several = os.environ.get("GROUP_WORLD_SIZE", "1") != "1"
    return 0 if several else int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))


def is_first() -> bool:
    """Whether this process speaks to the user: torchrun's first one, or the only one."""
    return os.environ.get("RANK", "0") == "0" or None in map(os.environ.get, OF_TORCHRUN)


def is_set(name: str) -> bool:
    """Whether a variable has any value but the empty one."""
    return bool(os.environ.get(name))


def set_default(name: str, value: str) -> None:
    """Set a variable that a library reads when it is first used, unless the user has set it."""
    os.environ.setdefault(name, value)


def accelerates_delta_rule() -> bool:
    """Return whether DDL_ACCELERATE_DELTA_RULE is 1, for `ddl.hf.accelerate_delta_rule`.

    Raises InputError for another value than 1 or 0.
    """
    value = os.environ.get("DDL_ACCELERATE_DELTA_RULE") or "0"
    if value not in ("0", "1"):
        raise InputError("DDL_ACCELERATE_DELTA_RULE", "be 1 or 0", repr(value))
    return value == "1"


def to_report() -> dict[str, str]:
    """The variables that a report may show, because none is private: ours and those of threads."""
    return {
        name: value
        for name, value in os.environ.items()
        if name in OURS or name.startswith(OF_THREADS)
    }


def unknown() -> list[str]:
    """Names of variables that begin as ours do and are none of this version, sorted."""
    ours = [name for name in os.environ if name.startswith("DDL_") and name not in OURS]
    return sorted(name for name in ours if not name.startswith(OF_THE_TESTS))


def cache_directory() -> Path | None:
    """The directory of compiled kernels, as src/environment.rs chooses it; None if there is none.

    DDL_CACHE_DIR, else `ddl` in the user's cache directory. Raises InputError if the ~ in the
    former cannot be expanded.
    """
    if os.environ.get("DDL_CACHE_DIR"):
        return at_home(os.environ["DDL_CACHE_DIR"], argument="DDL_CACHE_DIR")
    caches = os.environ.get("XDG_CACHE_HOME", "")
    if os.path.isabs(caches):
        return Path(caches) / "ddl"
    try:
        return Path.home() / ".cache" / "ddl"
    except RuntimeError:  # no home directory is known
        return None
