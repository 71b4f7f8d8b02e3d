"""Command: one subcommand of `ddl`, and parsing of its arguments into a configuration."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable
from contextlib import redirect_stderr
from typing import Any, NamedTuple

from ddl import environment
from ddl.errors import InputError


class Command(NamedTuple):
    """A subcommand: its line in `ddl --help`, configuration class, function and required extra.

    run: takes the arguments; returns the exit status, None for 0.
    """

    summary: str
    options: type
    run: Callable[[list[str]], int | None]
    extra: str = "train"


def parse(kind: Any, args: list[str], *, positional: bool = False, **options: Any) -> Any:
    """Parse the arguments into a configuration of class `kind`.

    If a configuration raises InputError for a value, tyro prints the class's name and exits. This
    raises that InputError instead, so that `main` can name the option.
    """
    import tyro

    config = (tyro.conf.PositionalRequiredArgs,) if positional else ()
    said = io.StringIO()
    try:
        with redirect_stderr(said):
            return tyro.cli(kind, args=args, config=config, **options)
    except SystemExit as stop:
        cause = stop.__context__
        while cause is not None and not isinstance(cause, InputError):
            cause = cause.__context__
        if cause is not None:
            raise cause from None
        if environment.is_first():
            print(said.getvalue(), end="", file=sys.stderr)
        raise
