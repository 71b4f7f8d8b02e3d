"""Command: one subcommand of `ddl`, and parsing of its arguments into a configuration."""

from __future__ import annotations

import dataclasses
import io
import sys
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any, NamedTuple

from ddl import environment
from ddl.errors import InputError
from ddl.text import visible

from .terminal import unguarded

HELP = frozenset(("-h", "--help"))


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
        if not HELP.isdisjoint(args):
            given = {"default": _visible(options["default"])} if "default" in options else {}
            with redirect_stdout(unguarded(sys.stdout)), redirect_stderr(said):
                tyro.cli(kind, args=args, config=config, **options | given)  # coloured, and exits
        with redirect_stdout(_Colourless(sys.stdout.encoding)), redirect_stderr(said):
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


class _Colourless(io.StringIO):
    """Standard output as tyro looks at it to write an error: what it quotes is shown with escapes,
    and so would be the codes of its colours."""

    def __init__(self, encoding: str) -> None:
        super().__init__()
        self._encoding = encoding

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return self._encoding


def _visible(config: Any) -> Any:
    """A configuration, of a file perhaps, as the help may show it."""
    shown = {
        field.name: type(value)(visible(str(value)))
        for field in dataclasses.fields(config)
        if isinstance(value := getattr(config, field.name), str | Path)
    }
    return dataclasses.replace(config, **shown)
