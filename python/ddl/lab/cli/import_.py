"""`ddl import`."""

from __future__ import annotations

from ddl.lab.config import ImportConfig

from .command import Command, parse

HELP = """Write a checkpoint of nanoGPT or of the paper's code for Hugging Face's Auto classes, or
the paper's back.

ddl import checkpoint.pt imported

ddl import imported theirs --reverse"""


def run(args: list[str]) -> None:
    config = parse(ImportConfig, args, prog="ddl import", description=HELP, positional=True)
    from ddl.lab.exchange import import_checkpoint

    print(*import_checkpoint(**vars(config)), sep="\n")


COMMAND = Command(
    "convert a checkpoint of nanoGPT or of the paper's code: ddl import SRC OUT",
    ImportConfig,
    run,
    "train,hf",
)
