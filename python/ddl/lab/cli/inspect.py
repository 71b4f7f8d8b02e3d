"""`ddl inspect`."""

from __future__ import annotations

from ddl.lab.config import InspectConfig
from ddl.lab.output import make_console, print_line, print_table

from .command import Command, parse

HELP = """Show what the rewrites of a trained model do over depth: gates, errors, writes, which
writes survive to the end, and with --prompt what each sublayer would say. Of a model without
rewrites, such as an additive one, it shows what the sublayers add.

ddl inspect runs/tiny --prompt "The statement" """


def run(args: list[str]) -> None:
    config = parse(InspectConfig, args, prog="ddl inspect", description=HELP, positional=True)
    from ddl.lab.analysis.inspect_path import inspect_path
    from ddl.lab.analysis.inspection_tables import (
        AUDIT,
        audit_table,
        depth_table,
        has_rewrites,
        lens_table,
        sentences,
    )

    found = inspect_path(config, make_console(stderr=True))
    if config.json:
        import json

        print(json.dumps(found.summary))
        return
    console = make_console()
    print_table(console, depth_table(found.summary))
    if has_rewrites(found.summary):
        print_table(console, audit_table(found.summary))
        console.print(AUDIT, markup=False, highlight=False)
    console.print(sentences(found.summary), markup=False, highlight=False)
    if found.lens is not None and found.tokenizer is not None:
        print_table(console, lens_table(found.lens, found.tokenizer))
    for path in found.files:
        print_line(console, f"wrote {path}")


COMMAND = Command("what the sublayers of a model do: ddl inspect RUN", InspectConfig, run)
