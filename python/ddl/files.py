"""Files and directories: recognise the kind of model at a path, read regular files alone, and write
results atomically and through no link."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import io
import json
import os
import re
import secrets
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from enum import Enum
from pathlib import Path
from typing import BinaryIO

from ddl.errors import InputError, first_line, reason_of

CONFIG = "config.json"
RUN_METRICS = "metrics.jsonl"  # every run of `ddl train` has one
# `model_type` in ddl.hf's config.json; a run's config.json has none.
MODEL_TYPE, NANOGPT_MODEL_TYPE = "ddl", "ddl-nanogpt"
# `model_type` in the papers' code, by the layout of its parameters.
PAPER_MODEL_TYPES = {"c_proj": "nanogpt-pro", "o_proj": "nanogptpro"}
WEIGHT_SUFFIXES = (".pt", ".pth", ".bin", ".safetensors")


def at_home(path: str | Path, *, argument: str) -> Path:
    """The path, with `~` or `~user` at its beginning replaced by that home directory.

    Raises InputError, which names the argument, if there is no such home directory, or if the text
    is no path: empty, or with characters that no path may have.
    """
    text = os.fspath(path)
    if not (text and _is_encodable(text)):
        raise InputError(argument, "be a path", repr(text))
    try:
        return Path(path).expanduser()
    except RuntimeError as error:
        raise InputError(
            argument,
            "begin with the ~ of a user whose home directory is known",
            f"{path}: write the whole path",
        ) from error


def _is_encodable(text: str) -> bool:
    """Whether the operating system can be given this text as a path."""
    try:
        return b"\0" not in os.fsencode(text)
    except UnicodeEncodeError:
        return False


def require_utf8(path: Path, *, argument: str) -> None:
    """Raise InputError, which names the argument, for a path that safetensors, tokenizers or JSON
    cannot have."""
    try:
        os.fsencode(path).decode("utf-8")
    except UnicodeError as error:
        raise InputError(argument, "be a path in UTF-8", repr(str(path))) from error


# --- kinds of paths -------------------------------------------------------------------------------


class PathKind(Enum):
    """Kinds of paths that hold a model; the values name them in error messages."""

    RUN = "a run directory of `ddl train`"
    DDL = "a Hugging Face directory with a model of ddl"
    HUGGING_FACE = "a Hugging Face directory with another model"
    CHECKPOINT = "a checkpoint of nanoGPT or of the paper's code"


def path_kind(path: Path) -> PathKind | None:
    """The kind of model at `path`, judged by file names and config.json; None if there is none."""
    found = _recognise(path)
    return found if isinstance(found, PathKind) else None


def require_kind(path: Path, *expected: PathKind, argument: str) -> PathKind:
    """Return the kind of model at `path`; raise InputError if it is none of `expected`."""
    found = _recognise(path)
    if found in expected:
        return PathKind(found)
    *others, last = [kind.value for kind in expected]
    must = f"{', '.join(others)} or {last}" if others else last
    got = f", {found.value}" if isinstance(found, PathKind) else f": {found}"
    hint = ", for `ddl import`" if found is PathKind.CHECKPOINT else ""
    raise InputError(argument, f"be {must}", f"{path}{got}{hint}")


def _recognise(path: Path) -> PathKind | str:
    """The kind of model at `path`, or a sentence part that says why there is none."""
    try:
        if path.is_file():
            around = _recognise(path.parent)
            ours = around in (PathKind.RUN, PathKind.DDL)
            return f"a file in {PathKind(around).value}" if ours else PathKind.CHECKPOINT
        names = os.listdir(path)
        text = read_text(path / CONFIG) if CONFIG in names else "{}"
        config = json.loads(text)
    except OSError as error:
        return reason_of(error)
    except (ValueError, RecursionError) as error:
        return f"its {CONFIG} cannot be read: {first_line(error)}"
    fields = config if isinstance(config, dict) else {}
    model, model_type = fields.get("model"), fields.get("model_type")
    if model_type in (MODEL_TYPE, NANOGPT_MODEL_TYPE):
        return PathKind.DDL
    if model_type is not None and model_type not in PAPER_MODEL_TYPES.values():
        return PathKind.HUGGING_FACE
    if isinstance(model, dict) and "residual" in model:
        return PathKind.RUN
    if CONFIG not in names and RUN_METRICS in names:
        return f"a run that has lost its {CONFIG}"
    if any(name.lower().endswith((*WEIGHT_SUFFIXES, ".index.json")) for name in names):
        return PathKind.CHECKPOINT
    run = next((name for name in sorted(names) if (path / name / RUN_METRICS).is_file()), None)
    if run is not None:
        return f"a directory with runs in it: name one of them, such as {path / run}"
    return f"neither weights nor the {CONFIG} of a model in it"


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
        reason = getattr(error, "strerror", None) or first_line(error)
        raise InputError(argument, "be writable", f"{path}: {reason}") from error


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


def write_text(path: Path, text: str, *, argument: str = "out") -> None:
    """Write `text` as UTF-8, atomically; see `atomic_file`."""
    with atomic_file(path, argument=argument) as temporary:
        temporary.write_text(text, encoding="utf-8")


def append_line(path: Path, line: str, *, argument: str = "out") -> None:
    """Add a line to a file. If a killed process has left half a line, a line of its own follows it.

    Raises InputError if the file cannot be written, or is a link: see `target`.
    """
    refuse_link(path, argument=argument)
    with writing(path, argument=argument), open(path, "ab+", opener=_not_through_links) as file:
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


@contextmanager
def alone_in(directory: Path, *, argument: str = "out") -> Iterator[None]:
    """Make a directory, and keep out other processes that call this for it.

    A process that ends, even by a signal, no longer keeps others out. Raises InputError if another
    one is there, or the directory cannot be made.
    """
    with writing(directory, argument=argument):
        directory.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(directory, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise InputError(
                argument,
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


def _is_filled_in_place(directory: Path) -> bool:
    """Whether an existing directory cannot be replaced by a rename: it has files, is the root of a
    file system, or lies where nothing can be made."""
    if not directory.is_dir():
        return False
    writable = os.access(directory.parent, os.W_OK)
    return any(directory.iterdir()) or os.path.ismount(directory) or not writable


def checksum(path: Path) -> str:
    """SHA-256 of a file, in hexadecimal digits. Raises OSError if it cannot be read."""
    digest, block = hashlib.sha256(), memoryview(bytearray(2**20))
    with open_file(path) as file:
        while count := file.readinto(block):  # type: ignore[attr-defined]
            digest.update(block[:count])
    return digest.hexdigest()


def remove(path: Path) -> None:
    """Remove a file or a directory with all that is in it, if it exists."""
    if path.is_dir() and not path.is_symlink():
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
