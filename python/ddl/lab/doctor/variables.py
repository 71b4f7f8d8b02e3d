"""Environment variables of ours that are set, and values that have no effect."""

from __future__ import annotations

from ddl import environment

from .report import Facts, Report, tilde

CHOICES = {"DDL_LOG": ("debug",), "DDL_SIMD": ("portable", "avx2"), "DDL_THREADS": ("rayon",)}
LONGEST = 100  # characters of a value that are shown
FIX = "unset it, or see docs/environment.md"


def variables(report: Report) -> Facts:
    """Our variables and those of threads, by name. Others are never read."""
    given = environment.to_report()
    for name, choices in CHOICES.items():
        value = given.get(name)
        if value is None:
            continue
        if value not in choices:
            expected = " or ".join(choices)
            report.warning(f"`{name}` must be {expected}, got {shown(value)}: it is ignored", FIX)
        elif name == "DDL_SIMD":
            report.warning(f"`{name}` lowers the instructions of the CPU kernels", "unset it")
    if given.get("DDL_PLAN"):
        report.warning(
            "`DDL_PLAN` overrides how CUDA kernels are cut, which is for measuring", "unset it"
        )
    threads = given.get("OMP_NUM_THREADS", "1")
    if not all(part.strip().isdigit() and int(part) > 0 for part in threads.split(",")):
        expected = "must be a number of threads"
        report.warning(f"`OMP_NUM_THREADS` {expected}, got {shown(threads)}: it is ignored", FIX)
    for name in environment.unknown():
        report.warning(f"`{name}` is no variable of this version", "correct its name, or unset it")
    return {name: shown(value) for name, value in given.items()}


def shown(value: str) -> str:
    """A value without control characters, not too long, and with ~ for the home directory."""
    text = "".join(c if c.isprintable() else "?" for c in tilde(value))
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}…"
