"""Files and directories: replaced atomically, so that a killed process leaves no half of one, and
written by one process at a time."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import re
import secrets
import shutil
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from ddl.errors import InputError, reason_of


@contextmanager
def writing(path: Path, *, argument: str = "out") -> Iterator[None]:
    """Turn a write error in the block into an InputError that names the argument."""
    try:
        yield
    except Exception as error:
        # safetensors has its own error for a full disk; by name, because it may not be installed.
        if not isinstance(error, OSError) and type(error).__name__ != "SafetensorError":
            raise
        raise InputError(argument, "be writable", f"{path}: {reason_of(error)}") from error


@contextmanager
def atomic_file(path: Path, *, argument: str = "out") -> Iterator[Path]:
    """Yield a temporary file that replaces `path`, or what this links to, atomically at the end.

    A reader sees the old file or the new one. If writing fails, the old one stays. Permissions are
    as after open(path, "w"). Raises InputError if the file cannot be written.
    """
    with writing(path, argument=argument):
        final = path.resolve()
        temporary = _temporary(final)
        try:
            temporary.touch()
            mode = (final if final.exists() else temporary).stat().st_mode
            yield temporary
            temporary.chmod(mode)  # safetensors makes a file private
            sync(temporary)
            temporary.replace(final)
            sync(final.parent)
        finally:
            temporary.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """Write `text` as UTF-8, atomically; see `atomic_file`."""
    with atomic_file(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


@contextmanager
def atomic_directory(path: Path, *, argument: str = "out") -> Iterator[Path]:
    """Yield a temporary directory that becomes `path` atomically at the end.

    If `path` exists, each new file replaces its namesake atomically, and other files stay. If
    writing fails in the block, nothing changes. Permissions are as after mkdir and open. Raises
    InputError if the directory cannot be written.
    """
    with writing(path, argument=argument):
        final = path.resolve()
        exists = final.is_dir()  # perhaps a mounted one, which cannot be renamed
        place = final if exists else final.parent
        temporary = _temporary(place / final.name)
        try:
            temporary.mkdir(parents=True)
            mode = temporary.stat().st_mode & 0o666
            yield temporary
            for entry in temporary.rglob("*"):
                if entry.is_file():
                    entry.chmod(mode)
                sync(entry)
            sync(temporary)
            for entry in sorted(temporary.iterdir()) if exists else [temporary]:
                entry.replace(final / entry.name if exists else final)
            sync(place)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)


def append_line(path: Path, line: str) -> None:
    """Add a line to a file; after half a line, which a killed process has left, on a new line."""
    with writing(path), path.open("ab+") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - 1))
        cut = file.read() not in (b"", b"\n")
        file.write(("\n" if cut else "").encode() + line.encode() + b"\n")


def sync(path: Path) -> None:
    """Flush a file, or the names in a directory, to the disk: else a power cut can lose them."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # some file systems sync no directory
            raise
    finally:
        os.close(descriptor)


def make_directory(path: Path) -> None:
    """Make a directory and those above it; raise InputError if that fails."""
    with writing(path):
        path.mkdir(parents=True, exist_ok=True)


@contextmanager
def new_directories(path: Path) -> Iterator[None]:
    """If the block raises, remove the empty directories that it made: `path` and those above it."""
    missing = [directory for directory in (path, *path.parents) if not directory.exists()]
    try:
        yield
    except BaseException:
        for directory in missing:
            with suppress(OSError):
                directory.rmdir()
        raise


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
            got = f"{directory}, into which another one is writing"
            raise InputError("out", "be a directory of this process alone", got) from error
        except OSError:  # some network file systems have no locks
            pass
        yield
    finally:
        os.close(descriptor)


def is_locked(directory: Path) -> bool:
    """Whether a process is in `alone_in` for this directory.

    This locks the directory for an instant, in which `alone_in` fails: call it only after a change.
    """
    if not directory.exists():
        return False
    try:
        with alone_in(directory):
            return False
    except InputError:
        return True


def remove(path: Path) -> None:
    """Remove a file, a link, or a directory with all that is in it, if it exists."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def remove_at_once(directory: Path) -> None:
    """Remove a directory so that no reader sees a part of it."""
    with writing(directory):
        remove(directory.rename(_temporary(directory)))


def _temporary(final: Path) -> Path:
    """A new temporary name in the same directory: only there is a rename atomic."""
    return final.with_name(f".{final.name}.{secrets.token_hex(4)}.tmp")


def unfinished(name: str) -> str | None:
    """The name of what was being written or removed under this temporary name; None for others."""
    match = re.fullmatch(r"\.(.+)\.[0-9a-f]{8}\.tmp", name)
    return match[1] if match else None


def names_in(out: Path) -> list[str]:
    """The names in a directory to write to, sorted; none if it does not exist yet. Raises
    InputError if it cannot be read, or is a file."""
    try:
        return sorted(os.listdir(out))
    except FileNotFoundError:
        return []
    except OSError as error:
        raise InputError("out", "be a directory", f"{out}: {reason_of(error)}") from error


def require_new_directory(out: Path, *, argument: str = "out") -> None:
    """Raise InputError, which names the argument, unless `out` is new or an empty directory."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        got = "a directory with files" if out.is_dir() else "a file"
        raise InputError(argument, "be a new or empty directory", f"{out}, {got}: choose another")


def written(out: Path) -> str:
    """A line for the user that lists the files in the directory."""
    return f"wrote {out}: {', '.join(sorted(path.name for path in out.iterdir()))}"


def checksum(path: Path) -> str:
    """SHA-256 of a file, in hexadecimal digits. Raises OSError if it cannot be read."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(2**20):
            digest.update(block)
    return digest.hexdigest()


@contextmanager
def without_advice_on_pickles() -> Iterator[None]:
    """Silence what torch says of a pickle that it is about to refuse: our message replaces it."""
    with warnings.catch_warnings():
        advice = "Detected pickle protocol|'torch.load' received a zip file"
        warnings.filterwarnings("ignore", message=advice)
        yield
