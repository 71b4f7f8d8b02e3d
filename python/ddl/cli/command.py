"""A command of `ddl`, and its arguments as a configuration."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable
from contextlib import redirect_stderr
from typing import Any, NamedTuple

from ddl.errors import InputError


class Command(NamedTuple):
    """A subcommand: a line for `ddl --help`, its options, its function, the extra that it needs."""

    summary: str
    options: type
    run: Callable[[list[str]], None]
    extra: str = "train"


def parse(kind: Any, args: list[str], *, positional: bool = False, **options: Any) -> Any:
    """The configuration of this kind that the arguments describe.

    tyro answers a value that a configuration refuses with the name of its class and exits. Here the
    refusal itself is raised, for `main` to name the option.
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
        print(said.getvalue(), end="", file=sys.stderr)
        raise
