"""Directories that commands write, in one piece or not at all, and tell from one another."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ddl.errors import InputError

MODEL_TYPE = "ddl"  # in the config.json of ddl.hf; a run's has none


def is_hf(path: Path) -> bool:
    """Whether ddl.hf wrote this directory: its config.json names the type of the model."""
    try:
        config = json.loads((path / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(config, dict) and config.get("model_type") == MODEL_TYPE


def refuse_used(out: Path) -> None:
    """Raises InputError unless `out` is new or an empty directory."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        got = "a directory with files" if out.is_dir() else "a file"
        raise InputError(f"`out` must be a new or empty directory, got {out}, {got}")


@contextmanager
def all_or_nothing(out: Path) -> Iterator[Path]:
    """A directory to write into, which becomes `out`, new or empty until then, in one step.

    If the writing fails it is removed; whoever kills the process finds it beside `out`. Raises
    InputError where it cannot be written.
    """
    final = out.resolve()  # what a link points to
    written = final.with_name(f".{final.name}.{os.getpid()}.tmp")
    try:
        written.mkdir(parents=True)
        yield written
        written.replace(final)
    except BaseException as error:
        shutil.rmtree(written, ignore_errors=True)
        if isinstance(error, OSError):
            reason = error.strerror or error
            raise InputError(f"`out` must be writable, got {out}: {reason}") from error
        raise


def written(out: Path) -> str:
    """A line that says what is in the directory now."""
    return f"wrote {out}: {', '.join(sorted(path.name for path in out.iterdir()))}"
