"""Command: one subcommand of `ddl`, and parsing of its arguments into a configuration."""

from __future__ import annotations

import dataclasses
import io
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any, NamedTuple, get_type_hints

from ddl import environment
from ddl.errors import InputError
from ddl.lab.output import escaped, unguarded


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

    shown = [escaped(arg) for arg in args], _shown(options)
    clean, said = shown == (args, options), io.StringIO()
    out = unguarded(sys.stdout) if clean else io.StringIO()  # tyro colours what it prints
    names = (tyro.conf.PositionalRequiredArgs, tyro.conf.PositionalMetavarFromFieldName)
    config = names if positional else ()
    try:
        with redirect_stdout(out), redirect_stderr(said), _rules():
            return tyro.cli(kind, args=args, config=config, **options)
    except SystemExit as stop:
        _raise_cause(stop)
        if positional and stop.code and (more := _besides(kind, args, config)):
            required = (f for f in dataclasses.fields(kind) if f.default is dataclasses.MISSING)
            named = " ".join(field.name.upper() for field in required)
            raise InputError.sentence(
                f"`{options['prog']}` must be called with {named} and options alone, got"
                f" {more!r} besides: call it once for each"
            ) from None
        if not clean:  # print the same, with escapes
            parse(kind, shown[0], positional=positional, **shown[1])
        elif environment.is_first():
            print(said.getvalue(), end="", file=unguarded(sys.stderr))
        raise


def _rules() -> AbstractContextManager[Any]:
    """Let tyro keep an empty path as empty text, and wrap the help of an option only once.

    `Path("")` is the current directory, which nobody has named; the configuration refuses "". A
    field's documentation has line ends of the source, which tyro would keep.
    """
    from docstring_parser import parse_from_object
    from tyro import MISSING_NONPROP, constructors

    registry = constructors.ConstructorRegistry()

    @registry.struct_rule
    def options(info: constructors.StructTypeInfo) -> Any:
        if not dataclasses.is_dataclass(info.type):
            return None
        given = info.default if isinstance(info.default, info.type) else None
        hints = get_type_hints(info.type, include_extras=True)
        documented = parse_from_object(info.type).params
        texts = {entry.arg_name: entry.description or "" for entry in documented}

        def field(one: dataclasses.Field[Any]) -> constructors.StructFieldSpec:
            default = MISSING_NONPROP if one.default is dataclasses.MISSING else one.default
            if one.default_factory is not dataclasses.MISSING:
                default = one.default_factory()
            if given is not None:
                default = getattr(given, one.name)
            text = " ".join(texts.get(one.name, "").split())
            return constructors.StructFieldSpec(one.name, hints[one.name], default, text)

        fields = tuple(map(field, dataclasses.fields(info.type)))
        return constructors.StructConstructorSpec(info.type, fields)

    @registry.primitive_rule
    def path(info: constructors.PrimitiveTypeInfo) -> Any:
        if info.type is not Path:
            return None
        return constructors.PrimitiveConstructorSpec(
            nargs=1,
            metavar="PATH",
            instance_from_str=lambda args: Path(args[0]) if args[0] else "",
            is_instance=lambda value: isinstance(value, Path),
            str_from_instance=lambda value: [str(value)],
        )

    return registry


def _raise_cause(stop: SystemExit) -> None:
    """Raise the InputError that tyro has caught, if it has ended because of one."""
    cause = stop.__context__
    while cause is not None and not isinstance(cause, InputError):
        cause = cause.__context__
    if cause is not None:
        raise cause from None


def _besides(kind: Any, args: list[str], config: Any) -> str | None:
    """The first argument behind the positional ones that is no option; None if there is none.

    Raises the InputError of a configuration that lacks an option, perhaps in this one's place.
    """
    import tyro

    try:
        with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()), _rules():
            _, more = tyro.cli(kind, args=args, config=config, return_unknown_args=True)
    except SystemExit as stop:
        _raise_cause(stop)
        return None
    return more[0] if more and not more[0].startswith("-") else None


def _shown(options: dict[str, Any]) -> dict[str, Any]:
    """tyro's options with a default, of a run's file perhaps, that may be printed."""
    default = options.get("default")
    if default is None:
        return options
    values = {field.name: getattr(default, field.name) for field in dataclasses.fields(default)}
    texts = {name: value for name, value in values.items() if isinstance(value, str | Path)}
    changes = {name: type(value)(escaped(str(value))) for name, value in texts.items()}
    if changes == texts:
        return options
    return options | {"default": dataclasses.replace(default, **changes)}
