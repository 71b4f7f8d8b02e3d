"""The `ddl` command. Heavy packages are imported only after a subcommand's arguments are parsed."""

from __future__ import annotations

import dataclasses
import errno
import signal
import sys
import typing
from collections.abc import Sequence
from contextlib import nullcontext, suppress
from typing import Any

import ddl
from ddl import environment
from ddl.errors import DivergedError, InputError, OtherProcessError, ProcessError, reason_of
from ddl.lab.config import Tracker
from ddl.lab.output import guarded_output, one_line

from . import (
    bench,
    compare,
    demo,
    doctor,
    eval,
    explore,
    export,
    import_,
    inspect,
    prepare,
    report,
    sample,
    sweep,
    train,
)
from .terminal import (
    Terminated,
    discard_output,
    escape_what_cannot_be_written,
    interrupted_by_signals,
    nobody_reads,
    replace_closed_output,
)

COMMANDS = {
    "prepare": prepare.COMMAND,
    "train": train.COMMAND,
    "sample": sample.COMMAND,
    "demo": demo.COMMAND,
    "eval": eval.COMMAND,
    "inspect": inspect.COMMAND,
    "compare": compare.COMMAND,
    "report": report.COMMAND,
    "sweep": sweep.COMMAND,
    "explore": explore.COMMAND,
    "export": export.COMMAND,
    "import": import_.COMMAND,
    "bench": bench.COMMAND,
    "doctor": doctor.COMMAND,
}

# Packages that the extras install.
EXTRA = {"tyro", "rich", "safetensors", "matplotlib", "numpy", "tomli", "plotly", "jinja2"}
HF_EXTRA = {"transformers", "accelerate", "tokenizers", "huggingface_hub"}
TRACKERS = set(typing.get_args(Tracker))  # extras of their own names
EXTRA |= HF_EXTRA | TRACKERS | {"lm_eval", "datasets", "pyarrow", "textual"}

HANDLE_SIGNALS = ("train", "sweep", "explore")  # on their own
NOBODY_READS = 128 + 13  # as shells report SIGPIPE


def main(argv: Sequence[str] | None = None) -> int:
    """Run a subcommand; return 0 on success, 1 after an error message, 2 for wrong usage."""
    replace_closed_output()
    escape_what_cannot_be_written()
    with guarded_output():
        return _guarded(list(sys.argv[1:] if argv is None else argv))


def _guarded(args: list[str]) -> int:
    if not environment.is_first():  # the first process speaks for all
        discard_output()
    try:
        try:
            return _main(args)
        finally:
            sys.stdout.flush()  # so that a closed pipe raises here and not at exit
    except BrokenPipeError:
        if not nobody_reads():  # the broken pipe is another one
            raise
        return NOBODY_READS
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO):
            raise
        discard_output()
        print(f"ddl: the output must be writable, got: {reason_of(error)}", file=sys.stderr)
        return 1


def _main(args: list[str]) -> int:
    if not args or args[0] in ("-h", "--help"):
        print(usage())
        return 0 if args else 2
    if args[0] == "--version":
        print(f"ddl {ddl.__version__}")
        return 0
    name = args.pop(0)
    if name not in COMMANDS:
        if environment.is_first():
            known = ", ".join(COMMANDS)
            print(f"ddl: the command must be one of {known}, got {name!r}", file=sys.stderr)
        return 2
    try:
        if name != "train":
            _require_one_process()
        with nullcontext() if name in HANDLE_SIGNALS else interrupted_by_signals():
            return COMMANDS[name].run(args) or 0
    except (InputError, DivergedError, ProcessError, ModuleNotFoundError, OSError) as error:
        sentence = explain(name, error)
        if sentence is None or environment.is_set("DDL_TRACEBACK"):
            raise
        if environment.is_first() or isinstance(error, ProcessError | OSError):
            print(f"ddl {name}: {one_line(sentence)}", file=sys.stderr)
        return 1
    except OtherProcessError:  # which has said why
        return 1
    except KeyboardInterrupt as error:
        with suppress(OSError):  # the terminal may be gone
            print(f"ddl {name}: interrupted", file=sys.stderr)
        return 128 + (error.number if isinstance(error, Terminated) else signal.SIGINT)


def _require_one_process() -> None:
    launched = environment.launched()
    if launched is not None and launched.processes > 1:
        raise InputError.sentence(
            f"only `ddl train` runs in several processes, got {launched.processes} of torchrun:"
            " start the command without it"
        )


def usage() -> str:
    """The text of `ddl --help`."""
    lines = [f"  {name:8}{command.summary}" for name, command in COMMANDS.items()]
    commands = "\n".join(lines)
    return (
        "usage: ddl COMMAND …\n\nDeep Delta Learning: the residual stream as a delta rule.\n"
        f"\ncommands:\n{commands}\n\n`ddl COMMAND --help` shows all options with their defaults; "
        "`ddl --version` the version."
    )


def explain(command: str, error: Exception) -> str | None:
    """The message for an error that the user can fix; None for any other error."""
    if isinstance(error, InputError | ProcessError):
        return str(error.renamed(_flags(COMMANDS[command].options)))
    if isinstance(error, DivergedError):
        return str(error)
    if isinstance(error, OSError) and error.filename is not None:  # of a path in an option or file
        return f"`{error.filename}` must be a path that can be used, got: {reason_of(error)}"
    module = str(error.name).split(".")[0] if isinstance(error, ModuleNotFoundError) else None
    if module in EXTRA:
        extra = COMMANDS[command].extra
        if extra == "train" and module in HF_EXTRA:  # `ddl sample` with a Hugging Face directory
            extra = "train,hf"
        if module in TRACKERS:
            extra = f"train,{module}"
        return f"`ddl {command}` needs the `{extra}` extra: pip install 'ddl-rs[{extra}]'"
    return None


def _flags(kind: Any, prefix: str = "--") -> dict[str, str]:
    """The word for every field of a configuration, including nested ones, as a user types it: its
    flag or, for a positional argument, its name in the help."""
    flags: dict[str, str] = {}
    hints = typing.get_type_hints(kind)
    for field in dataclasses.fields(kind):
        if dataclasses.is_dataclass(hints[field.name]):
            inside = _flags(hints[field.name], f"{prefix}{field.name}.")
            flags |= inside | {f"{field.name}.{name}": flag for name, flag in inside.items()}
        elif field.default is dataclasses.MISSING:
            flags[field.name] = field.name.upper()
        else:
            flags[field.name] = f"{prefix}{field.name.replace('_', '-')}"
    return flags
