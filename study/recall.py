"""A task that needs overwriting: variables are assigned again and again, and asked for.

    python -m study.recall time     # tied states against untied ones, of the delta rule over time
    python -m study.recall depth    # residuals: additive, and rewrites that erase or do not

A statement is four characters: `c=7 ` assigns, `c?7 ` asks and gives the answer, the value that was
assigned last. What is assigned and asked is drawn at random, and what is asked was assigned within
the last `span` statements: only the answers can be known, and the loss counts only them. Every
sequence begins with nothing assigned.

Each variant's learning rate is the best of three or more, on the last task and a seed of its own:
as long as the best is the lowest or the highest, one half or twice as high is tried. Then it is
trained on every task with three other seeds, on equal text. What has a record in study/records is
not trained again.
"""

from __future__ import annotations

import argparse
import random
import string
import sys
import time
from collections import defaultdict
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice, product
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ddl.lab.device import pick_device
from ddl.lab.train.device import make_repeatable
from ddl.models import GPT, GPTConfig
from ddl.optim import OptimConfig, learning_rate, make_optimizer, set_learning_rate

from . import records, side_by_side
from .graphed import GraphedStep
from .records import Record

VALUES = "0123456789ABCDEF"
ASKED = 0.5  # share of questions among the statements
BATCH, STEPS, WARMUP = 16, 2000, 100
SCORED = 256  # sequences
SEEDS_OF_A_RUN = 1_000_000  # those below are of what is scored
MOST_WRITES = 8  # assignments are counted apart up to so many
TUNED_ON, SEEDS = 101, (1, 2, 3)
RECORDS = records.FOLDER / "recall"
IGNORED = -100


@dataclass(frozen=True)
class Task:
    """Tokens of a sequence, variables, and statements within which what is asked was assigned."""

    block: int
    variables: int
    span: int


# --- the task -------------------------------------------------------------------------------------


def statements(r: random.Random, task: Task) -> Iterator[tuple[str, int | None]]:
    """Statements without end, and for a question how often its variable was assigned by then."""
    value: dict[str, str] = {}
    assigned: dict[str, int] = {}  # variable → statement of its last assignment
    writes: dict[str, int] = defaultdict(int)
    number = 0
    while True:
        known = sorted(name for name, at in assigned.items() if number - at <= task.span)
        if known and r.random() < ASKED:
            name = r.choice(known)
            yield f"{name}?{value[name]} ", writes[name]
        else:
            name = string.ascii_lowercase[r.randrange(task.variables)]
            value[name], assigned[name] = r.choice(VALUES), number
            writes[name] += 1
            yield f"{name}={value[name]} ", None
        number += 1


def sequence(seed: int, task: Task) -> tuple[list[int], list[int | None]]:
    """The tokens of a sequence, and of every statement what `statements` counts."""
    found = list(islice(statements(random.Random(seed), task), task.block // 4))
    return list("".join(text for text, _ in found).encode()), [writes for _, writes in found]


def answers_of(tokens: Tensor) -> Tensor:
    """The labels: the answers alone, which follow a question mark."""
    asked = torch.zeros_like(tokens, dtype=torch.bool)
    asked[:, 1:] = tokens[:, :-1] == ord("?")
    return tokens.masked_fill(~asked, IGNORED)


# --- a run ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Run:
    variant: str
    task: Task
    model: GPTConfig
    lr: float
    seed: int

    @property
    def name(self) -> str:
        task = self.task
        return f"{self.variant}-T{task.block}-v{task.variables}-lr{self.lr:g}-s{self.seed}"


def train(run: Run) -> GPT:
    """Train a model on sequences that no other step has, the same for every variant of a seed."""
    device = pick_device("auto", run.model.residual)
    make_repeatable(device)
    torch.manual_seed(run.seed)
    model = GPT(run.model).to(device)
    config = OptimConfig(lr=run.lr, warmup_steps=WARMUP)
    optimizer = make_optimizer(model, config)

    def loss_of(tokens: Tensor) -> Tensor:
        loss = model(tokens, labels=answers_of(tokens)).loss
        assert loss is not None
        return loss

    graphed = GraphedStep(optimizer, loss_of, config.clip) if device.type == "cuda" else None
    for step in range(STEPS):
        lr = learning_rate(config, step, STEPS)
        first = SEEDS_OF_A_RUN * run.seed + BATCH * step
        seeds = range(first, first + BATCH)
        tokens = torch.tensor([sequence(seed, run.task)[0] for seed in seeds])
        if graphed is not None:
            graphed(tokens, lr)
            continue
        set_learning_rate(optimizer, lr)
        optimizer.zero_grad()
        loss_of(tokens).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), config.clip)
        optimizer.step()
    return model


@torch.inference_mode()
def score(model: GPT, task: Task, device: torch.device) -> dict[str, Any]:
    """How often the model knows the answer: of all, and over how often it had been assigned."""
    right: dict[int, list[bool]] = defaultdict(list)
    for number in range(SCORED):
        tokens, written = sequence(number, task)
        idx = torch.tensor([tokens], device=device)
        likeliest = model(idx).logits[0].argmax(-1).tolist()
        for at, writes in enumerate(written):
            if writes is not None:
                known = likeliest[4 * at + 1] == tokens[4 * at + 2]
                right[min(writes, MOST_WRITES)].append(known)
    every = [known for group in right.values() for known in group]
    return {
        "accuracy": sum(every) / len(every),
        "questions": len(every),
        "by_writes": {
            n: [sum(group) / len(group), len(group)] for n, group in sorted(right.items())
        },
    }


def record_of(run: Run) -> dict[str, Any]:
    start = time.process_time()
    model = train(run)
    device = next(model.parameters()).device
    return {
        "name": run.name,
        "variant": run.variant,
        "task": vars(run.task),
        "lr": run.lr,
        "seed": run.seed,
        "steps": STEPS,
        "parameters": model.num_parameters(),
        **score(model, run.task, device),
        "processor_seconds": round(time.process_time() - start),
        "processor": records.processor(device),
    }


# --- what is compared -----------------------------------------------------------------------------

OVER_TIME = GPTConfig(
    residual="additive",
    vocab_size=128,
    block_size=256,
    num_layers=2,
    hidden_size=64,
    head_size=8,
)
# States of 4·8² numbers in every layer, and MLPs that make the parameters equal within 0.3 %.
TIME = {
    "deltanet": replace(OVER_TIME, mixer="deltanet", num_heads=4, mlp_size=194),
    "deltaproduct": replace(OVER_TIME, mixer="deltaproduct", mixer_n=2, num_heads=4, mlp_size=170),
    "multi-kv": replace(OVER_TIME, mixer="multi-kv", mixer_n=2, num_heads=2, mlp_size=200),
    "multi-value": replace(OVER_TIME, mixer="multi-value", mixer_n=2, num_heads=2, mlp_size=205),
}
OVER_DEPTH = GPTConfig(
    residual="additive",
    vocab_size=128,
    block_size=256,
    num_layers=4,
    num_heads=4,
    hidden_size=64,
)
DEPTH = {
    "additive": OVER_DEPTH,
    "tied": replace(OVER_DEPTH, residual="ddl-cc-noec"),
    "none": replace(OVER_DEPTH, residual="ddl-cc-noec", erase="none"),
}


class Compared(NamedTuple):
    """Models by variant, the tasks they are trained on, and the learning rates to begin with."""

    variants: dict[str, GPTConfig]
    tasks: list[Task]
    rates: tuple[float, ...]


SETS = {
    "time": Compared(TIME, [Task(256, 24, 48)], (1.5e-3, 3e-3, 6e-3, 1.2e-2)),
    "depth": Compared(
        DEPTH,
        [Task(block, v, 2 * v) for block, v in product((64, 128), (3, 8))],
        (3e-3, 6e-3, 1.2e-2),
    ),
}


def planned(which: str, kept: Collection[Record]) -> list[Run]:
    """The runs that can be done: those to tune, on the last task, and of tuned variants all."""
    compared = SETS[which]
    runs = []
    for variant, model in compared.variants.items():
        rates, best = tuned(variant, compared, kept)
        runs += [run_of(variant, model, compared.tasks[-1], lr, TUNED_ON) for lr in rates]
        if best is not None:
            pairs = product(SEEDS, compared.tasks)
            runs += [run_of(variant, model, task, best, seed) for seed, task in pairs]
    return runs


def run_of(variant: str, model: GPTConfig, task: Task, lr: float, seed: int) -> Run:
    return Run(variant, task, replace(model, block_size=task.block), lr, seed)


def tuned(
    variant: str, compared: Compared, kept: Collection[Record]
) -> tuple[list[float], float | None]:
    """The learning rates to try, and the best once it lies between others; by `rates_tried`."""
    task = vars(compared.tasks[-1])
    accuracy = {
        record["lr"]: record["accuracy"]
        for record in kept
        if (record["variant"], record["task"], record["seed"]) == (variant, task, TUNED_ON)
    }
    return records.rates_tried(compared.rates, accuracy, factor=2)


def jobs(which: str, out: Path) -> Iterator[side_by_side.Job]:
    """The runs that can be planned with the records so far."""
    for run in planned(which, records.by_name(out).values()):
        yield side_by_side.Job(run.name, out, partial(record_of, run))


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("which", choices=tuple(SETS))
    parser.add_argument("--records", type=Path, default=RECORDS, help="where to keep them")
    side_by_side.arguments_of(parser)
    args = parser.parse_args(arguments)
    plan = partial(jobs, args.which, args.records / f"{args.which}.jsonl")
    return 1 if side_by_side.run(plan, args.processes, 60 * args.minutes) else 0


if __name__ == "__main__":
    sys.exit(main())
