"""The libraries that are timed beside ours, and the sentence that is printed if one is missing.

Nothing here imports torch. between.py calls what these libraries export.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

from gpu.log import Line

COMMIT = "d1f76215c999be3089fe3132fe30e7a63dc8bbcb"  # of the authors' repository
MHC = "mHC, another function of the same bytes: X' = M X + b fᵀ and x = X'ᵀ a, no norm; next b, M"


class Library(NamedTuple):
    """package: on PyPI, "" for the authors' repository. series: the versions whose API we call."""

    title: str
    computes: str
    package: str = ""
    series: str = ""


LIBRARIES = {
    "ours": Library("ddl-rs", "a rewrite and the channel read after it, as published: X', h, v, β"),
    "authors": Library(
        "the authors' Triton code",
        "the same function, X', x, h; v and β come with the rewrite, which reads x and h again",
    ),
    "liger-kernel": Library("Liger", MHC, "liger-kernel", "0.8"),  # as of 0.8.0 and 0.8.5
    "tile-kernels": Library("TileKernels", MHC, "tile-kernels", "1.0"),  # as of 1.0.0
}


@dataclass
class Missing:
    """The piece of a library that is not there: the sentence."""

    name: str
    reason: str
    limit: float = 0.0

    def lines(self, limit: float) -> Iterator[Line]:
        yield {"what": self.name, "skipped": self.reason}


def why_skipped(name: str, device: str, folder: str | None) -> str | None:
    """A sentence that says what to install or give, or None. folder: with the authors' code."""
    if name == "ours":
        return None
    reason = missing_folder(folder) if name == "authors" else missing_package(LIBRARIES[name])
    return reason or (None if device == "cuda" else "its kernels need a GPU")


def missing_folder(folder: str | None) -> str | None:
    if folder is None:
        return (
            "give --authors FOLDER, a clone of github.com/yifanzhang-pro/deep-delta-learning at "
            f"{COMMIT[:7]}, with its requirements (pydantic, Triton)"
        )
    if not (Path(folder) / "model" / "modules" / "ddl_shortconv.py").is_file():
        return (
            f"--authors must be a clone at {COMMIT[:7]}: it has no model/modules/ddl_shortconv.py"
        )
    if sys.version_info < (3, 14):
        return f"this code needs Python 3.14, this is {sys.version_info[0]}.{sys.version_info[1]}"
    return None


def missing_package(library: Library) -> str | None:
    install = f"pip install '{library.package}=={library.series}.*'"
    try:
        version = metadata.version(library.package)
    except metadata.PackageNotFoundError:
        return f"not installed: {install}"
    if not version.startswith(f"{library.series}."):
        return f"version {version} is installed, whose API may be another: {install}"
    return None


def version_of(name: str) -> str:
    """The version of what is timed, for its record."""
    package = LIBRARIES[name].package
    return metadata.version(package) if package else {"authors": COMMIT[:7]}.get(name, "")
