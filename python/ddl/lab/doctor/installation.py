"""Versions: ddl, torch, Python and the system, and the packages of the extras."""

from __future__ import annotations

import importlib.metadata
import platform
import re
from pathlib import Path

from ddl.lab.machine import digest

from .report import Facts, Report, is_linux, text_of

DISTRIBUTION = "ddl-rs"
OLDEST_TORCH, OLDEST_GLIBC = (2, 10), (2, 28)
PACKAGE = re.compile(r"([\w.-]+)(?:\[([\w,-]*)\])?")  # of a requirement: ddl-rs[hf,train]
EXTRA = re.compile(r"extra\s*==\s*['\"]([\w-]+)['\"]")


def versions(report: Report) -> Facts:
    """ddl, Python, torch, operating system, C library; problems for those that are too old."""
    facts: Facts = {"python": platform.python_version(), "system": system()}
    libc, version = platform.libc_ver()
    facts["libc"] = f"{libc} {version}".strip() or None
    if is_linux() and libc == "glibc" and numbers(version) < OLDEST_GLIBC:
        report.error(
            f"glibc is {version}, and the wheel needs 2.28",
            "use a newer system or container, or build from source on this one",
        )
    facts["ddl"], facts["native"] = native(report)
    facts["torch"] = torch_version(report)
    return facts


def system() -> str:
    """The operating system's name and version, without the machine's name."""
    try:
        named = platform.freedesktop_os_release().get("PRETTY_NAME")
    except OSError:
        named = None
    return f"{named or platform.system()}, {platform.release()}, {platform.machine()}"


def native(report: Report) -> tuple[str | None, str | None]:
    """The version of the package, and the digest of the extension."""
    try:
        from ddl import _native
    except Exception as error:
        report.error(
            f"the native extension of ddl-rs cannot be loaded ({text_of(error)})",
            "reinstall it by `pip install --force-reinstall --no-deps ddl-rs`, for this Python",
        )
        return installed(DISTRIBUTION), None
    assert _native.__file__ is not None
    return _native.__version__, digest(Path(_native.__file__))


def torch_version(report: Report) -> str | None:
    """The version of torch; problems if it cannot be imported or is too old."""
    try:
        import torch
    except Exception as error:
        report.error(
            f"torch cannot be imported ({text_of(error)})",
            "install it as https://pytorch.org says, in the environment of ddl-rs",
        )
        return None
    version = str(torch.__version__)
    if numbers(version) < OLDEST_TORCH:
        report.error(f"torch is {version}, and ddl-rs needs 2.10", "install a newer torch")
    return version


def numbers(version: str) -> tuple[int, ...]:
    """2.11.0+cu130 → (2, 11, 0)."""
    found = re.match(r"\d+(\.\d+)*", version)
    return tuple(map(int, found[0].split("."))) if found else ()


def installed(name: str) -> str | None:
    """The version of a distribution; None if it is not installed or its metadata are damaged."""
    try:
        return importlib.metadata.version(name)
    except Exception:  # damaged metadata raise nearly anything
        return None


def packages(report: Report) -> Facts:
    """The packages of each extra, with their versions; those of an extra that it names, too."""
    try:
        lines = importlib.metadata.requires(DISTRIBUTION) or []
    except importlib.metadata.PackageNotFoundError:
        lines = []
    extras: dict[str, list[tuple[str, list[str]]]] = {}
    for line in lines:
        package, extra = PACKAGE.match(line), EXTRA.search(line)
        backport = "python_" in line  # of the standard library, for an older Python
        if package is not None and extra is not None and extra[1] != "dev" and not backport:
            named = [] if package[2] is None else package[2].split(",")
            extras.setdefault(extra[1], []).append((package[1], named))

    def listed(extra: str) -> list[str]:
        names = list[str]()
        for name, others in extras.get(extra, []):
            nested = [found for other in others for found in listed(other)]
            names += nested if name == DISTRIBUTION else [name]
        return list(dict.fromkeys(names))

    if not lines:
        report.warning(
            "the package's metadata are missing, so the extras are not known",
            "install the package by pip, if this is no checkout",
        )
    return {
        extra: {name: installed(name) or "missing" for name in listed(extra)}
        for extra in sorted(extras)
    }
