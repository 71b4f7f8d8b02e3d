"""`ddl compare`."""

from __future__ import annotations

import json

from ddl.lab.config import CompareConfig
from ddl.lab.output import make_console, print_line

from .command import Command, parse

HELP = """Compare runs: losses, parameters, speed, memory and the newest evaluation of `ddl eval`.

ddl compare runs/additive runs/ddl-cc --plot losses.png

ddl compare runs/sweep --paired

ddl compare runs/sweep --plot losses.png --over flops

ddl compare runs/sweep --data other.txt

Runs that still train can be compared, and so can runs that differ in data, vocabulary, batch size
or number of steps; a note below the tables names such differences. --json and --markdown print the
same in these formats."""


def run(args: list[str]) -> None:
    config = parse(CompareConfig, args, prog="ddl compare", description=HELP, positional=True)
    from ddl.lab.analysis import compare, document, tables
    from ddl.lab.analysis.paired import pair

    compared = compare.compare(config.runs)
    if config.data is not None:
        compared = compare.with_data(compared, config.data, make_console(stderr=True))
    paired = pair(compared.runs, config.baseline) if config.paired else None
    if config.plot is not None:
        compared = compare.plot(compared, config.plot, config.over)
    if config.json:
        print(json.dumps(document.document(compared, paired), indent=2, allow_nan=False))
    elif config.markdown:
        print(tables.markdown(compared, paired))
    else:
        console = make_console()
        tables.show(compared, console, paired)
        if config.plot is not None:
            print_line(console, f"wrote {config.plot}")


COMMAND = Command("compare runs: ddl compare RUN…", CompareConfig, run)
