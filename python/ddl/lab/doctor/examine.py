"""All sections of the report in order, and the report as text."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from .cache import cache
from .gpus import gpus
from .operators import operators
from .processor import processor
from .report import Facts, Report
from .selftest import selftest
from .variables import variables
from .versions import packages, versions


def sections(*, whole_cache: bool = False) -> dict[str, Callable[[Report], Facts]]:
    """The examinations by name, in the order of the report."""
    return {
        "versions": versions,
        "processor": processor,
        "gpus": gpus,
        "kernel_cache": partial(cache, whole=whole_cache),
        "environment": variables,
        "operators": operators,
        "extras": packages,
        "selftest": selftest,
    }


def examine(*, whole_cache: bool = False) -> Report:
    """Examine this installation; raises nothing, whatever is broken.

    whole_cache: check every compiled kernel, however long it takes.
    """
    report = Report()
    for name, probe in sections(whole_cache=whole_cache).items():
        report.examine(name, probe)
    return report


def text(report: Report) -> str:
    """The report for people, and for an issue."""
    lines: list[str] = []
    for name, facts in report.sections.items():
        lines.append(name.replace("_", " "))
        lines += [f"  {line}" for line in SHORT.get(name, plain)(facts)]
    lines.append("")
    if not report.problems:
        lines.append("Everything works.")
    for problem in report.problems:
        lines.append(f"{problem.level}: {problem.sentence}.")
    if report.problems and report.ok:
        lines.append("Everything that is needed works.")
    return "\n".join(lines)


def plain(facts: Facts) -> Iterator[str]:
    """A line for each fact."""
    if not facts:
        yield "nothing is set"
    for name, value in facts.items():
        yield f"{name.replace('_', ' ')}: {worded(value)}"


def worded(value: Any) -> str:
    """A fact in words."""
    if value is None or value == []:
        return "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)


def short_gpus(facts: Facts) -> Iterator[str]:
    if "failed" in facts:
        yield from plain(facts)
        return
    found = facts["nvrtc"]
    where = found["file"] or ("yes" if found["found"] else f"not found ({found['why']})")
    yield f"torch is built for {facts['torch_built_for']}, driver: {worded(facts['driver'])}"
    yield f"nvrtc: {where}"
    for device in facts["devices"]:
        details = [worded(device[k]) for k in ("name", "capability", "memory_gib") if k in device]
        yield f"{device['device']}: {', '.join(details)}; {device['kernels']}"
    if not facts["devices"]:
        yield "no GPU"


def short_operators(facts: Facts) -> Iterator[str]:
    if "failed" in facts:
        yield from plain(facts)
        return
    counts = ", ".join(f"{count} for {key}" for key, count in facts["registered"].items())
    yield f"registered with torch: {counts}"
    for name, devices in facts["kernels"].items():
        yield f"{name}: " + "; ".join(f"{device}: {what}" for device, what in devices.items())
    for kernel in facts["cuda_kernels"]:
        yield f"{kernel['name']} ({kernel['architecture']}): {kernel['macros']}"


def short_environment(facts: Facts) -> Iterator[str]:
    if "failed" in facts or not facts:
        yield from plain(facts)
        return
    yield from (f"{name}={value}" for name, value in facts.items())


def short_extras(facts: Facts) -> Iterator[str]:
    if "failed" in facts:
        yield from plain(facts)
        return
    for extra, entry in facts.items():
        versions = [f"{n} {p['version'] or '–'}" for n, p in entry["packages"].items()]
        mark = "" if entry["complete"] else f" (incomplete: pip install 'ddl-rs[{extra}]')"
        yield f"{extra}: {', '.join(versions)}{mark}"


SHORT: dict[str, Callable[[Facts], Iterator[str]]] = {
    "gpus": short_gpus,
    "environment": short_environment,
    "operators": short_operators,
    "extras": short_extras,
}
