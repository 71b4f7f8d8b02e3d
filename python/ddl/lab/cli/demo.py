"""`ddl demo`, also `make demo`; the work is in side_by_side.py."""

from __future__ import annotations

from ddl.lab.config import DemoConfig
from ddl.lab.output import make_console

from .command import Command, parse

HELP = """Train the additive baseline and a DDL model side by side on text that every Python
carries: same seed, same batches, same backbone. Prints which is better and how fast each is.

ddl demo --steps 300"""


def run(args: list[str]) -> None:
    config = parse(DemoConfig, args, prog="ddl demo", description=HELP)
    from .side_by_side import demo

    demo(config, make_console())


COMMAND = Command("compare the additive residual with DDL in a few minutes", DemoConfig, run)
