"""`ddl export`."""

from __future__ import annotations

from ddl.lab.config import ExportConfig

from .command import Command, parse

HELP = """Write the model and tokenizer of a run for Hugging Face's Auto classes.

ddl export runs/ddl-tc-d256-L4-s1337 --hf exported"""


def run(args: list[str]) -> None:
    config = parse(ExportConfig, args, prog="ddl export", description=HELP, positional=True)
    from ddl.lab.exchange import export_run

    print(*export_run(config.run, config.hf, config.tokenizer, config.checkpoint), sep="\n")


COMMAND = Command(
    "write a run for Hugging Face: ddl export RUN --hf DIR", ExportConfig, run, "train,hf"
)
