"""Files and directories: read regular files alone, write results atomically and through no link."""

from __future__ import annotations

import errno
import hashlib
import io
import os
import re
import secrets
import shutil
import stat
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from ddl.errors import InputError, reason_of

# --- reading --------------------------------------------------------------------------------------


def open_file(path: Path) -> BinaryIO:
    """Open a regular file, or a link to one, for reading.

    Raises OSError for anything else: a device may have no end, and a pipe may never have a writer.
    """
    require_file(path)  # before it is opened, which some devices act upon
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # a pipe may have taken its place
    try:
        _require_regular(os.fstat(descriptor), path)
    except OSError:
        os.close(descriptor)
        raise
    return open(descriptor, "rb")


@contextmanager
def without_advice_on_pickles() -> Iterator[None]:
    """Silence what torch says of a pickle that it is about to refuse: our message replaces it."""
    with warnings.catch_warnings():
        for message in ("Detected pickle protocol", "'torch.load' received a zip file"):
            warnings.filterwarnings("ignore", message=message)
        yield


def read_bytes(path: Path) -> bytes:
    """The content of a file; raises OSError, as `open_file` does."""
    with open_file(path) as file:
        return file.read()


def read_text(path: Path, *, errors: str = "strict") -> str:
    """The UTF-8 text of a file, as `Path.read_text`; raises OSError, as `open_file` does."""
    with io.TextIOWrapper(open_file(path), encoding="utf-8", errors=errors) as file:
        return file.read()


def require_file(path: Path) -> None:
    """Raise OSError unless `path` is a regular file or a link to one, before a library opens it."""
    _require_regular(path.stat(), path)


def require_files(directory: Path) -> None:
    """Raise OSError for a pipe, a socket or a device in a directory or below it, before a library
    opens what it finds there."""
    for folder, _, names in os.walk(directory):
        for path in sorted(Path(folder, name) for name in names):
            if path.exists():  # a link may lead nowhere
                require_file(path)


def _require_regular(found: os.stat_result, path: Path) -> None:
    mode = found.st_mode
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if not stat.S_ISREG(mode):
        kind = "pipe" if stat.S_ISFIFO(mode) else "socket" if stat.S_ISSOCK(mode) else "device"
        raise OSError(errno.ENOTSUP, f"it is a {kind}, not a regular file", str(path))


# --- links ----------------------------------------------------------------------------------------


def target(path: Path) -> Path:
    """The path to write if a user has named `path`, which may be a link.

    The functions below write through no link: a link in a run directory may lead anywhere, and
    nobody has named it.
    """
    return path.resolve()


def refuse_link(path: Path, *, argument: str) -> None:
    """Raise InputError, which names the argument, if a path is a link."""
    if path.is_symlink():
        raise InputError(
            argument,
            "have no link where it is written",
            (
                f"{path}, a link to {os.readlink(path)}: put what it leads to in its place, or"
                " let the whole directory be a link"
            ),
        )


# --- writing --------------------------------------------------------------------------------------


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
    """Yield a temporary file beside `path` that replaces `path` atomically at the end.

    A reader sees the old file or the new one. If writing fails, the old one stays. A link is
    replaced, and the file that it leads to stays: see `target`. Permissions are as after
    open(path, "w"). Raises InputError if the file cannot be written, or is a device or a pipe.
    """
    temporary = _beside(path)
    with writing(path, argument=argument):
        try:
            replaced = path.stat() if path.exists() and not path.is_symlink() else None
            if replaced is not None:
                _require_regular(replaced, path)
            temporary.touch()
            mode = (replaced or temporary.stat()).st_mode
            yield temporary
            _finish(temporary, mode)
            temporary.replace(path)
            sync(path.parent)
        finally:
            temporary.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """Write `text` as UTF-8, atomically; see `atomic_file`."""
    with atomic_file(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def append_line(path: Path, line: str) -> None:
    """Add a line to a file. If a killed process has left half a line, a line of its own follows it.

    Raises InputError if the file cannot be written, or is a link: see `target`.
    """
    refuse_link(path, argument="out")
    with writing(path), open(path, "ab+", opener=_not_through_links) as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - 1))
        cut = file.read() not in (b"", b"\n")
        file.write(("\n" if cut else "").encode() + line.encode() + b"\n")


def _not_through_links(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW, 0o666)


def make_directory(path: Path, *, argument: str = "out") -> None:
    """Make a directory and those above it; raise InputError if that fails."""
    with writing(path, argument=argument):
        path.mkdir(parents=True, exist_ok=True)


@contextmanager
def new_directories(path: Path) -> Iterator[None]:
    """If the block raises, remove the directory that it made at `path`, and those above it, unless
    there is something in them."""
    missing = [directory for directory in (path, *path.parents) if not directory.exists()]
    try:
        yield
    except BaseException:
        for directory in missing:
            with suppress(OSError):
                directory.rmdir()
        raise


@contextmanager
def atomic_directory(path: Path, *, argument: str = "out") -> Iterator[Path]:
    """Yield a temporary directory beside `path` that becomes `path` atomically at the end.

    If `path` already has files, or no directory can be made or renamed beside it, the temporary
    one lies inside, and each new file replaces its namesake atomically while the others stay. If
    writing fails in the block, nothing changes. Permissions are as after mkdir and open. Raises
    InputError if the directory cannot be written, or is a link: see `target`.
    """
    refuse_link(path, argument=argument)
    with writing(path, argument=argument):
        temporary = path / _beside(path).name if _is_filled_in_place(path) else _beside(path)
        try:
            temporary.mkdir(parents=True)
            mode = _mode_of_new_files(temporary)
            yield temporary
            for entry in temporary.rglob("*"):
                if entry.is_file():
                    _finish(entry, mode)
                else:
                    sync(entry)
            sync(temporary)
            if temporary.parent == path:
                for entry in sorted(temporary.iterdir()):
                    entry.replace(path / entry.name)
                sync(path)
            else:
                temporary.replace(path)
                sync(path.parent)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)


def _is_filled_in_place(directory: Path) -> bool:
    """Whether an existing directory cannot be replaced by a rename: it has files, is the root of a
    file system, or lies where nothing can be made."""
    if not directory.is_dir():
        return False
    writable = os.access(directory.parent, os.W_OK)
    return any(directory.iterdir()) or os.path.ismount(directory) or not writable


def names_in(out: Path) -> list[str]:
    """The names in a directory to write to, sorted; none if it does not exist yet. Raises
    InputError if it cannot be read, or is a file."""
    try:
        return sorted(os.listdir(out))
    except FileNotFoundError:
        return []
    except OSError as error:
        raise InputError("out", "be a directory", f"{out}: {reason_of(error)}") from error


def checksum(path: Path) -> str:
    """SHA-256 of a file, in hexadecimal digits. Raises OSError if it cannot be read."""
    digest, block = hashlib.sha256(), memoryview(bytearray(2**20))
    with open_file(path) as file:
        while count := file.readinto(block):  # type: ignore[attr-defined]
            digest.update(block[:count])
    return digest.hexdigest()


def is_folder(path: Path) -> bool:
    """Whether a path is a directory, and no link to one, which may lie elsewhere."""
    return path.is_dir() and not path.is_symlink()


def remove(path: Path) -> None:
    """Remove a file or a directory with all that is in it, if it exists."""
    if is_folder(path):
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def remove_at_once(directory: Path) -> None:
    """Remove a directory, or a link to one, so that no reader sees a part of it."""
    with writing(directory):
        hidden = _beside(directory)
        directory.rename(hidden)
        remove(hidden)


def unfinished(name: str) -> str | None:
    """The name of what was being written or removed under this temporary name; None for others."""
    found = re.fullmatch(r"\.(.+)\.[0-9a-f]{8}\.tmp", name)
    return found[1] if found else None


def require_new_file(out: Path) -> None:
    """Raise InputError unless `out` is a new file in a writable directory."""
    if os.path.lexists(out):  # a link that leads nowhere, too
        raise InputError("out", "be a new file", f"{out}, which exists")
    if not (out.parent.is_dir() and os.access(out.parent, os.W_OK)):
        raise InputError("out", "be in a directory that can be written to", out)


def require_new_directory(out: Path, *, argument: str = "out") -> None:
    """Raise InputError, which names the argument, unless `out` is new or an empty directory."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        got = "a directory with files" if out.is_dir() else "a file"
        raise InputError(argument, "be a new or empty directory", f"{out}, {got}: choose another")


def written(out: Path) -> str:
    """A line for the user that lists the files in the directory."""
    return f"wrote {out}: {', '.join(sorted(path.name for path in out.iterdir()))}"


def _beside(final: Path) -> Path:
    """A new temporary name in the same directory: only there is a rename atomic."""
    return final.with_name(f".{final.name}.{secrets.token_hex(4)}.tmp")


def _mode_of_new_files(directory: Path) -> int:
    """The permissions that open() gives, by a probe: os.umask cannot be read without setting it."""
    probe = directory / ".mode"
    probe.touch()
    mode = probe.stat().st_mode
    probe.unlink()
    return mode


def _finish(file: Path, mode: int) -> None:
    """Set the permissions, because some writers make a file private, and flush it to the disk.

    Without the flush, a renamed file could be empty after a power cut.
    """
    file.chmod(mode)
    sync(file)


def sync(path: Path) -> None:
    """Flush a file, or the names in a directory, to the disk: else a power cut can lose them."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    except PermissionError:  # a directory may be one that can be written to and not read
        return
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # some file systems sync no directory
            raise
    finally:
        os.close(descriptor)
