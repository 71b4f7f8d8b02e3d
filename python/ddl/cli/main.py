"""The `ddl` command. Nothing heavy is imported before a subcommand has understood its arguments."""

from __future__ import annotations

import dataclasses
import io
import os
import re
import sys
import typing
from collections.abc import Callable, Sequence
from contextlib import redirect_stderr
from typing import Any, NamedTuple

from ddl.config import (
    PRESETS,
    DemoConfig,
    EvalConfig,
    ExportConfig,
    ImportConfig,
    SampleConfig,
    TrainConfig,
)
from ddl.errors import DivergedError, InputError

# What the extras bring.
EXTRA = {"tyro", "rich", "safetensors", "matplotlib", "numpy"}
HF_EXTRA = {"transformers", "accelerate", "tokenizers", "huggingface_hub"}
EXTRA |= HF_EXTRA | {"lm_eval", "datasets"}

TRAIN = """Train a language model. A preset, named first, sets the defaults of the options.

tiny: seconds on a CPU · demo: minutes on a CPU (the default) · small: 124 M and medium: 354 M
parameters with the papers' recipe; they need --data and a GPU.

ddl train demo --model.residual additive --data shakespeare.txt"""

SAMPLE = """Continue a prompt with the model of a run directory.

ddl sample runs/ddl-cc-d256-L4-s1337 --prompt "The statement" --tokens 200"""

DEMO = """Train the additive baseline and a DDL model side by side on text that every Python
carries: same seed, same batches, same backbone. Prints which is better and how fast each is."""


EVAL = """Score a run, or a Hugging Face model, on tasks of lm-evaluation-harness.

ddl eval runs/ddl-cc-d256-L4-s1337 --tasks arc_easy piqa --num-fewshot 1

Without --tasks: the papers' eight benchmarks, 0-shot and 1-shot."""

EXPORT = """Write the model and tokenizer of a run for Hugging Face's Auto classes.

ddl export runs/ddl-cc-d256-L4-s1337 --hf exported"""

IMPORT = """Write a checkpoint of the paper's code for Hugging Face's Auto classes, or back.

ddl import checkpoint.pt imported

ddl import imported theirs --reverse"""


def _train(args: list[str]) -> None:
    named = args[:1] if args and not args[0].startswith("-") else []
    name, options = named[0] if named else "demo", args[len(named) :]
    if name not in PRESETS:
        raise InputError(f"`preset` must be one of {', '.join(PRESETS)}, got {name!r}")
    tyro: dict[str, Any] = {
        "prog": f"ddl train {name if named else '[PRESET]'}",
        "description": TRAIN,
        "default": PRESETS[name],
    }
    if any(option in PRESETS for option in options):  # unless as the value of another
        _, unknown = _parse(TrainConfig, options, return_unknown_args=True, **tyro)
        late = next((option for option in unknown if option in PRESETS), None)
        if late is not None:
            raise InputError(f"`preset` must come first, as in `ddl train {late}`, got it later")
    config = _parse(TrainConfig, options, **tyro)
    from rich.console import Console

    from ddl.train import train

    train(config, Console())


def _sample(args: list[str]) -> None:
    config = _parse(SampleConfig, args, prog="ddl sample", description=SAMPLE, positional=True)
    from rich.console import Console

    from .sample import printable, sample

    print(printable(sample(config, Console(stderr=True))))


def _demo(args: list[str]) -> None:
    config = _parse(DemoConfig, args, prog="ddl demo", description=DEMO)
    from rich.console import Console

    from .demo import demo

    demo(config, Console())


def _eval(args: list[str]) -> None:
    config = _parse(EvalConfig, args, prog="ddl eval", description=EVAL, positional=True)
    from ddl.evaluation import evaluate, tables

    record = evaluate(config)
    print(tables(record))
    print(f"wrote {record['out']}")


def _export(args: list[str]) -> None:
    config = _parse(ExportConfig, args, prog="ddl export", description=EXPORT, positional=True)
    from ddl.hf.files import export_run

    print(*export_run(config.run, config.hf, config.tokenizer), sep="\n")


def _import(args: list[str]) -> None:
    config = _parse(ImportConfig, args, prog="ddl import", description=IMPORT, positional=True)
    from ddl.paper import import_checkpoint

    print(*import_checkpoint(**vars(config)), sep="\n")


def _parse(kind: Any, args: list[str], *, positional: bool = False, **options: Any) -> Any:
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


class Command(NamedTuple):
    """A subcommand: a line for `ddl --help`, its options, what it does with its arguments."""

    summary: str
    options: type
    run: Callable[[list[str]], None]
    extra: str = "train"


COMMANDS = {
    "train": Command(
        "train a language model: ddl train [preset] [--overrides]", TrainConfig, _train
    ),
    "sample": Command("continue a prompt: ddl sample RUN --prompt TEXT", SampleConfig, _sample),
    "demo": Command("compare the additive residual with DDL in a few minutes", DemoConfig, _demo),
    "eval": Command(
        "score on benchmarks: ddl eval RUN --tasks arc_easy piqa", EvalConfig, _eval, "eval"
    ),
    "export": Command(
        "write a run for Hugging Face: ddl export RUN --hf DIR", ExportConfig, _export, "train,hf"
    ),
    "import": Command(
        "take over a checkpoint of the paper's code: ddl import SRC OUT",
        ImportConfig,
        _import,
        "train,hf",
    ),
}


def usage() -> str:
    """The text of `ddl --help`."""
    lines = [f"  {name:8}{command.summary}" for name, command in COMMANDS.items()]
    commands = "\n".join(lines)
    return (
        "usage: ddl COMMAND …\n\nDeep Delta Learning: the residual stream as a delta rule.\n"
        f"\ncommands:\n{commands}\n\n`ddl COMMAND --help` shows all options with their defaults."
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Run a subcommand; 0 on success, 1 after a sentence on standard error, 2 for wrong usage."""
    args = list(sys.argv[1:] if argv is None else argv)
    if not args or args[0] in ("-h", "--help"):
        print(usage())
        return 0 if args else 2
    name = args.pop(0)
    if name not in COMMANDS:
        known = ", ".join(COMMANDS)
        print(f"ddl: the command must be one of {known}, got {name!r}", file=sys.stderr)
        return 2
    try:
        COMMANDS[name].run(args)
    except (InputError, DivergedError, ModuleNotFoundError) as error:
        sentence = explain(name, error)
        if sentence is None or os.environ.get("DDL_TRACEBACK"):
            raise
        print(f"ddl {name}: {sentence}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"ddl {name}: interrupted", file=sys.stderr)
        return 130
    return 0


def explain(command: str, error: Exception) -> str | None:
    """The sentence for an error that the user can mend, None for one that is a defect."""
    if isinstance(error, InputError | DivergedError):
        flags = _flags(COMMANDS[command].options)
        # `num_layers` and `optim.lr` are what the command line calls --model.num-layers, --optim.lr
        named = re.sub(r"`(?:\w+\.)?(\w+)`", lambda m: flags.get(m[1], m[0]), str(error))
        # and `unless gate="mlp"` is `unless --model.gate="mlp"` there
        return re.sub(r'\b(\w+)(?==")', lambda m: flags.get(m[1], m[0]).strip("`"), named)
    module = str(error.name).split(".")[0] if isinstance(error, ModuleNotFoundError) else None
    if module in EXTRA:
        extra = COMMANDS[command].extra
        if extra == "train" and module in HF_EXTRA:  # `ddl sample` of a Hugging Face directory
            extra = "train,hf"
        return f"`ddl {command}` needs the `{extra}` extra: pip install 'ddl-rs[{extra}]'"
    return None


def _flags(kind: Any, prefix: str = "--") -> dict[str, str]:
    """The option for every field of a configuration, those of the parts in it included."""
    flags: dict[str, str] = {}
    hints = typing.get_type_hints(kind)
    for field in dataclasses.fields(kind):
        if dataclasses.is_dataclass(hints[field.name]):
            flags |= _flags(hints[field.name], f"{prefix}{field.name}.")
        elif field.default is not dataclasses.MISSING:  # without one it has no flag
            flags[field.name] = f"`{prefix}{field.name.replace('_', '-')}`"
    return flags


if __name__ == "__main__":
    sys.exit(main())
