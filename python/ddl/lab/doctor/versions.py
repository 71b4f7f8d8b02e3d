"""Versions: ddl, torch, Python and the system, and the packages of the extras with their bounds."""

from __future__ import annotations

import importlib.metadata
import platform
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from ddl.lab.machine import digest

from .report import Facts, Report, is_linux, text_of

DISTRIBUTION = "ddl-rs"
OLDEST_TORCH = ">=2.10"  # if the package's metadata are missing
OLDEST_GLIBC = (2, 28)


class Requirement(NamedTuple):
    """A line of the package's metadata, as `rich>=13.7 ; extra == "train"`."""

    name: str
    extras: tuple[str, ...]  # of this requirement: ddl-rs[train]
    bounds: str
    extra: str | None  # that it belongs to; None if it is always needed


def requirements() -> list[Requirement]:
    """The requirements of the installed package; none if it has no metadata."""
    try:
        lines = importlib.metadata.requires(DISTRIBUTION) or []
    except importlib.metadata.PackageNotFoundError:
        return []
    return [parsed for line in lines if (parsed := parse(line)) is not None]


def parse(line: str) -> Requirement | None:
    """A requirement of its line; None for one that cannot be understood, or of an older Python."""
    named, _, marker = line.partition(";")
    older = re.search(r"python(?:_full)?_version\s*<\s*['\"]([\d.]+)['\"]", marker)
    if older is not None and sys.version_info >= numbers(older[1]):
        return None
    found = re.fullmatch(r"\s*([\w.-]+)\s*(?:\[([\w,\s-]*)\])?\s*\(?([^()]*)\)?\s*", named)
    if found is None:
        return None
    extras = tuple(word.strip() for word in (found[2] or "").split(",") if word.strip())
    extra = re.search(r"extra\s*==\s*['\"]([\w-]+)['\"]", marker)
    bounds = found[3].replace(" ", "")
    return Requirement(found[1], extras, bounds, extra[1] if extra else None)


def numbers(version: str) -> tuple[int, ...]:
    """2.11.0+cu130 → (2, 11, 0)."""
    found = re.match(r"\d+(\.\d+)*", version)
    return tuple(map(int, found[0].split("."))) if found else ()


def fits(version: str, bounds: str) -> bool | None:
    """Whether a version is within bounds like ">=1.9,<2"; None for bounds of another form."""
    have = numbers(version)
    judged = True
    for bound in filter(None, bounds.split(",")):
        found = re.fullmatch(r"(>=|<)(\d+(?:\.\d+)*)", bound)
        if found is None or not have:
            return None
        limit = numbers(found[2])
        size = max(len(have), len(limit))
        left, right = ((*n, *[0] * (size - len(n))) for n in (have, limit))
        judged = judged and (left >= right if found[1] == ">=" else left < right)
    return judged


def installed(name: str) -> str | None:
    """The version of a distribution; None if it is not installed or its metadata are damaged."""
    try:
        version = importlib.metadata.version(name)
    except Exception:  # damaged metadata raise nearly anything
        return None
    return version if isinstance(version, str) else None  # None if the file lacks the field


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
    bounds = [r.bounds for r in requirements() if r.name == "torch" and r.extra is None]
    if fits(version, (bounds or [OLDEST_TORCH])[0]) is False:
        report.error(
            f"torch is {version}, and ddl-rs needs {(bounds or [OLDEST_TORCH])[0]}",
            "install a newer torch",
        )
    return version


def packages(report: Report) -> Facts:
    """For each extra: whether it is complete, and each of its packages with version and bounds."""
    known = requirements()
    if not known:
        report.warning(
            "the package's metadata are missing, so the extras cannot be compared with them",
            "install the package by pip, if this is no checkout",
        )
    extras = sorted({r.extra for r in known if r.extra is not None} - {"dev"})
    facts: Facts = {}
    for extra in extras:
        listed = {r.name: describe(r) for r in requirements_of(extra, known)}
        facts[extra] = {
            "complete": all(entry["version"] is not None for entry in listed.values()),
            "packages": listed,
        }
    for name, entry in {n: e for f in facts.values() for n, e in f["packages"].items()}.items():
        if entry["fits"] is False:
            report.warning(
                f"{name} is {entry['version']}, and ddl-rs was made for {entry['bounds']}",
                f"pip install '{name}{entry['bounds']}'",
            )
    return facts


def requirements_of(
    extra: str, known: list[Requirement], seen: tuple[str, ...] = ()
) -> Iterator[Requirement]:
    """The requirements of an extra, with those of the extras that it names."""
    for requirement in known:
        if requirement.extra != extra:
            continue
        if requirement.name != DISTRIBUTION:
            yield requirement
            continue
        for other in requirement.extras:
            if other not in (extra, *seen):
                yield from requirements_of(other, known, (extra, *seen))


def describe(requirement: Requirement) -> dict[str, Any]:
    version = installed(requirement.name)
    judged = None if version is None else fits(version, requirement.bounds)
    return {"version": version, "bounds": requirement.bounds, "fits": judged}
