"""The `ddl` command. Nothing heavy is imported before a subcommand runs."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence

from ddl.config import DemoConfig, DivergedError, InputError, SampleConfig, TrainConfig
from ddl.presets import PRESETS

EXTRA = {"tyro", "rich", "safetensors", "matplotlib", "numpy"}  # what the `train` extra brings

TRAIN = """Train a language model. A preset sets the defaults below; options override them.

tiny: seconds on a CPU · demo: minutes on a CPU (the default) · small: 124 M and medium: 353 M
parameters with the papers' recipe; they need --data.source and a GPU.

ddl train demo --model.residual additive --data.source shakespeare.txt"""

SAMPLE = """Continue a prompt with the model of a run directory.

ddl sample runs/ddl-cc-d256-L4-s1337 --prompt "The statement" --tokens 200"""

DEMO = """Train the additive baseline and a DDL model side by side on text that every Python
carries: same seed, same batches, same backbone. Prints which is better and how fast each is."""


def _train(args: list[str]) -> None:
    import tyro

    name = args.pop(0) if args and not args[0].startswith("-") else "demo"
    if name not in PRESETS:
        raise InputError(f"`preset` must be one of {', '.join(PRESETS)}, got {name!r}")
    config = tyro.cli(
        TrainConfig, prog=f"ddl train {name}", description=TRAIN, args=args, default=PRESETS[name]
    )
    from rich.console import Console

    from ddl.train import train

    train(config, Console())


def _sample(args: list[str]) -> None:
    import tyro

    positional = (tyro.conf.PositionalRequiredArgs,)
    config = tyro.cli(
        SampleConfig, prog="ddl sample", description=SAMPLE, args=args, config=positional
    )
    from ddl.sample import printable, sample

    print(printable(sample(config)))


def _demo(args: list[str]) -> None:
    import tyro

    config = tyro.cli(DemoConfig, prog="ddl demo", description=DEMO, args=args)
    from rich.console import Console

    from ddl.demo import demo

    demo(config, Console())


COMMANDS: dict[str, tuple[str, Callable[[list[str]], None]]] = {
    "train": ("train a language model: ddl train [preset] [--overrides]", _train),
    "sample": ("continue a prompt: ddl sample RUN --prompt TEXT", _sample),
    "demo": ("compare the additive residual with DDL in a few minutes", _demo),
}


def usage() -> str:
    """The text of `ddl --help`."""
    lines = [f"  {name:8}{summary}" for name, (summary, _) in COMMANDS.items()]
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
        COMMANDS[name][1](args)
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
        return str(error)
    if isinstance(error, ModuleNotFoundError) and error.name in EXTRA:
        return f"`ddl {command}` needs the `train` extra: pip install 'ddl-rs[train]'"
    return None


if __name__ == "__main__":
    sys.exit(main())
