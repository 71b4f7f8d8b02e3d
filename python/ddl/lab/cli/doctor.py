"""`ddl doctor`."""

from __future__ import annotations

import json
import sys
from importlib.util import find_spec

from ddl.lab.config import DoctorConfig
from ddl.lab.output import make_console, unguarded

from .command import Command, parse

HELP = """Examine this installation: versions, processor, GPUs, the cache of compiled kernels, which
kernels run where, and a test of the operators against ddl.reference. For everything that is wrong
it says how to fix it. The exit status is 1 if something that is needed does not work; a machine
without a GPU lacks nothing.

ddl doctor

ddl doctor --json

The output is made to be pasted into an issue: it has no names of users or machines, and of the
environment only the variables of ddl-rs and those of threads. It works without any extra."""


def run(args: list[str]) -> int:
    config = options(args)
    from ddl.lab.doctor.examine import examine, text

    report = examine()
    if config.json:
        print(json.dumps(report.to_json()))
    else:
        show(text(report))
    return 0 if report.ok else 1


def options(args: list[str]) -> DoctorConfig:
    """The options, also without tyro if there is nothing to explain: an extra may be missing."""
    if find_spec("tyro") is None and set(args) <= {"--json"}:
        return DoctorConfig(json=bool(args))
    return parse(DoctorConfig, args, prog="ddl doctor", description=HELP)


def show(report: str) -> None:
    """Print the report, in a terminal with its headings and problems in colour."""
    if not unguarded(sys.stdout).isatty() or find_spec("rich") is None:
        print(report)
        return
    from rich.text import Text

    console = make_console()
    colours = {"error:": "bold red", "warning:": "yellow", "Everything": "green"}
    for line in report.splitlines():
        word = line.split(" ")[0]
        style = colours.get(word, "bold" if line and not line.startswith(" ") else "")
        console.print(Text(line, style), soft_wrap=True)


COMMAND = Command("examine this installation: ddl doctor", DoctorConfig, run)
