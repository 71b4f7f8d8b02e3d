"""Locks: one process alone writes into a directory, one thread alone makes a class."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, wraps
from pathlib import Path
from threading import RLock
from typing import Any

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


def made_once(make: Callable[..., Any]) -> Callable[..., Any]:
    """Return `make` with a cache: the same arguments give the same object, in every thread.

    functools.cache alone lets two threads make one each, with and without Python's lock.
    """
    cached, lock = cache(make), RLock()

    @wraps(make)
    def made(*arguments: Any) -> Any:
        with lock:
            return cached(*arguments)

    return made
