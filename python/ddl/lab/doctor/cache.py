"""The directory of compiled kernels: writable, private, how full, and which entries are damaged.

The format of an entry is that of src/cuda/compile/cache.rs.
"""

from __future__ import annotations

import os
import re
import stat
import time
from pathlib import Path

from ddl import environment
from ddl.errors import InputError, reason_of

from .report import Facts, Report, tilde

MAGIC = b"ddl kernel 1\n"
CHECKSUM = 16  # bytes, little endian
HEADER = 16  # bytes: registers, spills, shared memory, length of the key
LONGEST_NAME = 255  # bytes of a name in a directory
SECONDS = 2.0  # for checksums, which Python computes at some MB per second
OFFSET, PRIME = 0x6C62272E07BB014262B821756295C58D, 0x0000000001000000000000000000013B
ELSEWHERE = "name another directory in DDL_CACHE_DIR"


def cache(report: Report, *, whole: bool = False) -> Facts:
    """Where compiled kernels are kept, and whether they can be. whole: check every entry."""
    try:
        directory = environment.cache_directory()
    except InputError as error:
        report.warning(str(error), ELSEWHERE)
        return {"directory": None}
    if directory is None:
        report.warning("there is no home directory for compiled kernels", ELSEWHERE)
        return {"directory": None}
    # os.path, because pathlib's functions raise for some paths, such as one that is too long.
    facts: Facts = {"directory": tilde(directory), "exists": os.path.exists(directory)}
    if not facts["exists"]:
        facts["writable"] = can_be_made(report, directory)
        return facts
    facts["writable"] = is_writable(report, directory)
    facts["private"] = is_private(report, directory)
    if not os.path.isdir(directory):
        return facts
    try:
        found = list(directory.iterdir())
    except OSError as error:
        report.warning(f"{tilde(directory)} cannot be read ({reason_of(error)})", ELSEWHERE)
        return facts
    return facts | contents(report, directory, found, whole=whole)


def can_be_made(report: Report, directory: Path) -> bool:
    """Whether the directory can be made at the first use."""
    place = next((p for p in directory.parents if os.path.exists(p)), None)
    possible = place is not None and os.path.isdir(place) and os.access(place, os.W_OK | os.X_OK)
    possible = possible and len(os.fsencode(directory.name)) <= LONGEST_NAME
    if not possible:
        report.warning(f"{tilde(directory)}, for compiled kernels, cannot be made", ELSEWHERE)
    return possible


def is_writable(report: Report, directory: Path) -> bool:
    """Whether entries can be written."""
    writable = directory.is_dir() and os.access(directory, os.W_OK | os.X_OK)
    if not writable:
        got = "cannot be written" if directory.is_dir() else "is no directory"
        report.warning(
            f"{tilde(directory)}, for compiled kernels, {got}, so that each process compiles them",
            ELSEWHERE,
        )
    return writable


def is_private(report: Report, directory: Path) -> bool:
    """Whether only the user can write there. CUDA kernels are refused if others can."""
    found = directory.stat()
    owner, others = found.st_uid in (os.geteuid(), 0), found.st_mode & 0o022
    if not owner:
        report.error(
            f"{tilde(directory)}, for compiled kernels, belongs to another user", ELSEWHERE
        )
    elif others:
        mode = stat.S_IMODE(found.st_mode)
        report.error(
            f"others can write to {tilde(directory)}, for compiled kernels (mode {mode:o}), so that"
            " CUDA kernels are refused",
            f"chmod go-w {tilde(directory)}",
        )
    return owner and not others


def contents(report: Report, directory: Path, found: list[Path], *, whole: bool) -> Facts:
    """Number and size of the kernels, those that are damaged, and what is left of killed writes."""
    kernels = [path for path in found if path.suffix == ".kernel" and path.is_file()]
    left = [path for path in found if re.fullmatch(r"\.\d+-\d+-\d+", path.suffix)]
    sizes = {path: path.stat() for path in kernels}
    newest = sorted(kernels, key=lambda path: sizes[path].st_mtime, reverse=True)
    damaged, checked = [], 0
    ends = time.monotonic() + (float("inf") if whole else SECONDS)
    for path in newest:
        if time.monotonic() > ends:
            break
        checked += 1
        if is_damaged(path):
            damaged.append(path.name)
    if damaged:
        report.warning(
            f"{len(damaged)} of {checked} compiled kernels are damaged, and will be compiled again",
            f"delete them in {tilde(directory)} if the disk is sound: {', '.join(damaged[:3])}"
            + (", …" if len(damaged) > 3 else ""),
        )
    if left:
        report.warning(
            f"{len(left)} files in {tilde(directory)} were left by processes that were killed",
            f"delete {left[0].name}" + (" and the like" if len(left) > 1 else ""),
        )
    return {
        "kernels": len(kernels),
        "mib": round(sum(entry.st_size for entry in sizes.values()) / 2**20, 1),
        "checked": checked,
        "damaged": damaged,
        "unfinished": len(left),
    }


def is_damaged(path: Path) -> bool:
    """Whether an entry is cut, changed, unreadable, or under another entry's name."""
    try:
        data = path.read_bytes()
    except OSError:
        return True
    start = len(MAGIC) + CHECKSUM
    body = data[start:]
    if not data.startswith(MAGIC) or len(body) < HEADER:
        return True
    length = int.from_bytes(body[12:16], "little")
    key = body[HEADER : HEADER + length]
    if len(key) < length or path.stem != f"{fnv_1a(key):032x}":
        return True
    return fnv_1a(body) != int.from_bytes(data[len(MAGIC) : start], "little")


def fnv_1a(data: bytes) -> int:
    """FNV-1a in 128 bits."""
    value = OFFSET
    for byte in data:
        value = ((value ^ byte) * PRIME) & (2**128 - 1)
    return value
