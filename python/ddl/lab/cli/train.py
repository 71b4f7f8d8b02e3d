"""`ddl train`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ddl.errors import InputError
from ddl.lab.config import PRESETS, TrainConfig
from ddl.lab.output import make_console

from .command import Command, parse
from .initial import load_initial, take_initial
from .recipe import take_recipe

HELP = """Train a language model. A preset, named first, sets the defaults of the options.

tiny: seconds on a CPU · demo: minutes on a CPU (the default) · small: 124 M and medium: 354 M
parameters with the papers' recipe; they need --data and a GPU.

The option --recipe paper-code sets the defaults to what the papers' published code does. An option
that is given wins over preset and recipe.

ddl train demo --model.residual additive --data shakespeare.txt

ddl train --resume runs/ddl-tc-d256-L4-s1337

With --init-from, a new run starts from the weights of another one, whose model it has:

ddl train demo --init-from runs/ddl-tc-d256-L4-s1337 --data other.txt --steps 100 --out runs/other

Ctrl-C, SIGTERM, SIGHUP or SIGUSR1 ends it after the step and a checkpoint; the exit status is then
128 and the signal's number, such as 130 and 143."""


def run(args: list[str]) -> int:
    named = args[:1] if args and not args[0].startswith("-") else []
    name, options = named[0] if named else "demo", args[len(named) :]
    if name not in PRESETS:
        raise InputError("preset", f"be one of {', '.join(PRESETS)}", repr(name))
    tyro: dict[str, Any] = {
        "prog": f"ddl train {name if named else '[PRESET]'}",
        "description": HELP,
    }
    resumed = _resumed(options, named)
    start = resumed or PRESETS[name]
    initial = take_initial(options, **tyro) if resumed is None else None
    if initial is not None:
        start = replace(start, model=initial[1])
    tyro["default"], options = take_recipe(start, options, **tyro)
    if any(option in PRESETS for option in options):  # unless as the value of another
        _, unknown = parse(TrainConfig, options, return_unknown_args=True, **tyro)
        late = next((option for option in unknown if option in PRESETS), None)
        if late is not None:
            raise InputError("preset", f"come first, as in `ddl train {late}`", "it later")
    config = parse(TrainConfig, options, **tyro)
    from ddl.lab.train import train
    from ddl.lab.train.initial import require_model

    if initial is not None:
        require_model(config.model, initial[1], initial[0])
    return train(config, make_console(), load=load_initial).status


def _resumed(options: list[str], preset: list[str]) -> TrainConfig | None:
    """The options of the run that --resume names; None without --resume and for auto."""
    run = None
    for i, option in enumerate(options):
        name, equals, value = option.partition("=")
        if name == "--resume":
            run = value if equals else "".join(options[i + 1 : i + 2])
    if run in (None, "auto"):
        return None
    if preset:
        raise InputError(
            "preset", "be left out with --resume, which has the run's options", preset[0]
        )
    from ddl.lab.train.resume import options_of

    return options_of(run)


COMMAND = Command("train a language model: ddl train [preset] [--overrides]", TrainConfig, run)
