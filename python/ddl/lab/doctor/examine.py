"""All sections of the report in order, and the report as text."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from .hardware import gpus, processor
from .installation import packages, versions
from .kernels import cache, operators
from .report import Facts, Report
from .selftest import selftest
from .variables import variables

# The examinations by name, in the order of the report.
SECTIONS: dict[str, Callable[[Report], Facts]] = {
    "versions": versions,
    "processor": processor,
    "gpus": gpus,
    "kernel_cache": cache,
    "environment": variables,
    "operators": operators,
    "extras": packages,
    "selftest": selftest,
}


def examine() -> Report:
    """Examine this installation; raises nothing, whatever is broken."""
    report = Report()
    for name, probe in SECTIONS.items():
        report.examine(name, probe)
    return report


def text(report: Report) -> str:
    """The report for people, and for an issue."""
    lines: list[str] = []
    for name, facts in report.sections.items():
        lines += [name.replace("_", " "), *_lines(facts)]
    lines.append("")
    if not report.problems:
        lines.append("Everything works.")
    for problem in report.problems:
        lines.append(f"{problem.level}: {problem.sentence}.")
    if report.problems and report.ok:
        lines.append("Everything that is needed works.")
    return "\n".join(lines)


def _lines(facts: Facts) -> Iterator[str]:
    """A line for each fact."""
    if not facts:
        yield "  nothing is set"
    for name, value in facts.items():
        is_word = name.isidentifier() and name.islower()  # and no kernel, device or variable
        label = name.replace("_", " ") if is_word else name
        yield f"  {label}: {worded(value)}"


def worded(value: Any) -> str:
    """A fact in words."""
    if value is None:
        return "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, dict):
        return ", ".join(f"{name} {entry}" for name, entry in value.items())
    return str(value)
