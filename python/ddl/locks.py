"""Locks: one process alone writes into a directory."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ddl.errors import InputError
from ddl.files import make_directory, writing


@contextmanager
def alone_in(directory: Path, *, wait: bool = False) -> Iterator[None]:
    """Make a directory, and keep out other processes that call this for it.

    A process that ends, even by a signal, no longer keeps others out. wait: for another one that is
    there. Raises InputError if one is and this does not wait, or the directory cannot be made.
    """
    make_directory(directory)
    with writing(directory):
        descriptor = os.open(directory, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError as error:
            raise InputError(
                "out",
                "be a directory of this process alone",
                f"{directory}, into which another one is writing",
            ) from error
        except OSError:  # some network file systems have no locks
            pass
        yield
    finally:
        os.close(descriptor)


def is_locked(directory: Path) -> bool | None:
    """Whether a process is in `alone_in` for this directory; None if that cannot be known.

    If none is, the directory is locked for the instant that it takes to see it, and a process that
    begins in this instant is refused. So do not ask again before something has changed.
    """
    try:
        descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    except OSError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # some network file systems have no locks
        return None
    finally:
        os.close(descriptor)
    return False
