"""`ddl report`."""

from __future__ import annotations

from ddl.lab.config import ReportConfig
from ddl.lab.output import make_console, print_line

from .command import Command, parse

HELP = """Write one HTML page about runs: the tables of `ddl compare`, loss curves, heat maps of
what `ddl inspect` and --record-every have measured, samples and configurations.

ddl report runs/additive runs/ddl-cc --out page.html

The page holds everything that it needs and loads nothing from a network. It has about 5 MB, because
plotly.js is in it."""


def run(args: list[str]) -> None:
    config = parse(ReportConfig, args, prog="ddl report", description=HELP, positional=True)
    from ddl.lab.analysis.report.page import write_report

    notes = write_report(config)
    console = make_console()
    for line in [*notes, f"wrote {config.out}"]:
        print_line(console, line)


COMMAND = Command("a page about runs: ddl report RUN… --out FILE", ReportConfig, run, "report")
