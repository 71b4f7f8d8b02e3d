"""`ddl explore`."""

from __future__ import annotations

import sys
from pathlib import Path

from ddl.errors import InputError
from ddl.lab.config import ExploreConfig
from ddl.lab.output import make_console, unguarded

from .command import Command, parse

HELP = """Look at runs in the terminal, live while they train: their losses and other curves, what
the rewrites do, comparisons, samples and options.

ddl explore runs/sweep

Press ? for the keys and q to quit. No file is written."""


def run(args: list[str]) -> int:
    config = parse(ExploreConfig, args, prog="ddl explore", description=HELP, positional=True)
    require_terminal()
    for path in config.runs:
        require_there(path)
    from ddl.lab.explore.screen import Explorer
    from ddl.lab.explore.watching import Watch

    explorer = Explorer(Watch(config.runs), interval=config.interval)
    explorer.error_console = make_console(stderr=True)
    return explorer.run() or explorer.return_code or 0


def require_terminal() -> None:
    """Raise InputError unless the screen can be shown and keys be read.

    textual draws on standard error and asks standard output for its size.
    """
    streams = {"input": sys.stdin, "output": sys.stdout, "error": sys.stderr}
    for name, stream in streams.items():
        if stream is None or not unguarded(stream).isatty():
            raise InputError.sentence(
                f"standard {name} must be a terminal, got a file or a pipe: `ddl compare` prints"
                " tables"
            )


def require_there(path: Path) -> None:
    """Raise InputError unless the path is a directory."""
    if not path.is_dir():
        got = "a file" if path.exists() else "nothing there"
        raise InputError("runs", "be run directories or folders with runs", f"{path}, {got}")


COMMAND = Command("look at runs while they train: ddl explore RUN…", ExploreConfig, run, "explore")
