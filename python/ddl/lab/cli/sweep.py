"""`ddl sweep`."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from ddl.errors import InputError
from ddl.lab.config import SweepConfig
from ddl.lab.config.sweeps import Sweep, read_sweep
from ddl.lab.output import make_console, one_line, print_line
from ddl.paths import is_run

from .command import Command, parse
from .initial import load_initial, model_at

if TYPE_CHECKING:
    from rich.console import Console

HELP = """Train variants × seeds × options, one run after the other, and compare them.

The file is TOML, and its options have the names that `ddl train` has for them. Each value of a list
among the options makes runs of its own:

preset = "tiny"

seeds = [1, 2, 3]

variants.additive.model.residual = "additive"

variants.cc.model.residual = "ddl-cc"

options.optim.lr = [1e-3, 2e-3]

Then

ddl sweep sweep.toml

The same command goes on after a stop: it skips the runs that are finished and resumes the others.
Ctrl-C, SIGTERM, SIGHUP or SIGUSR1 ends it after the step and a checkpoint, with 128 and the
signal's number as exit status, such as 130 and 143. If a run diverges, the others go on, and the
exit status is 1 in the end. As tasks of a scheduler:

ddl sweep sweep.toml --index $SLURM_ARRAY_TASK_ID

with tasks from 0 to one less than what --count prints. docs/comparing.md has more."""


def run(args: list[str]) -> int:
    config = parse(SweepConfig, args, prog="ddl sweep", description=HELP, positional=True)
    sweep = read_sweep(config.file, model_at)
    if config.count:
        print(len(sweep.runs))
        return 0
    if config.list:
        print(*listing(sweep), sep="\n")
        return 0
    from ddl.lab.train.sweep import train_sweep

    console = make_console()
    swept = train_sweep(sweep, console, index=config.index, load=load_initial)
    if swept.status <= 1 and config.index is None:
        show(sweep, console)
    for name, sentence in swept.failed.items():
        print(f"ddl sweep: {name}: {one_line(sentence)}", file=sys.stderr)
    return swept.status


def listing(sweep: Sweep) -> list[str]:
    """A line for each run: its number for --index, its name and its state."""
    from ddl.lab.train.sweep import state_of

    lines, width = [], max(len(run.name) for run in sweep.runs)
    for number, run in enumerate(sweep.runs):
        try:
            step, finished = state_of(run)
            state = "finished" if finished else f"step {step} of {run.config.steps}"
        except InputError as error:
            state = str(error)
        lines.append(f"{number:4}  {run.name:{width}}  {one_line(state)}")
    return lines


def show(sweep: Sweep, console: Console) -> None:
    """Print the comparison of a sweep's runs, paired if it has several seeds, and plot them."""
    from ddl.lab.analysis import compare, tables
    from ddl.lab.analysis.paired import pair
    from ddl.lab.train.runs import PLOT

    runs = [run for run in sweep.by_variant() if is_run(run.config.directory)]
    if not runs:
        return
    seeds = {run.config.seed for run in sweep.runs}
    compared = compare.compare([run.config.directory for run in runs])
    paired = pair(compared.runs) if len(seeds) > 1 else None
    tables.show(compared, console, paired)
    path = sweep.out / PLOT
    compare.plot(compared, path)
    print_line(console, f"Loss curves: {path}")


COMMAND = Command("train variants and seeds: ddl sweep FILE", SweepConfig, run)
