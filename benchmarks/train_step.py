"""Training steps of every residual on one backbone, against the additive one and plain PyTorch.

    python benchmarks/train_step.py            # the recorded configuration: a quarter of an hour
    python benchmarks/train_step.py --quick    # the same path in small: seconds, recorded nowhere
    python benchmarks/train_step.py --precision autocast --stream-dtype bfloat16 --no-peer

Each precision, anchor_every, stream_dtype and size has a record of its own in benchmarks/results.

A step is zero_grad(set_to_none), forward with loss, backward; with --adamw the optimizer's too. The
models of one mode (eager or compiled) are timed in interleaved rounds in one process. The fused
models form one group and plain PyTorch's another; each group contains the additive model. In a
round every model runs two steps and only the second is timed, because the first one restores the
memory and caches that a model would have if it trained alone. Before anything is timed, logits,
loss and all gradients of every form of a variant must agree with plain PyTorch in eager mode, at
the sizes that are timed. If one form of a variant fails, none of its forms is timed and the exit
status is 1. Under autocast their gradients must stay near those in float32.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from common import record
from common.candidates import Candidate, build, check_all, step
from common.floor import copies
from ddl.lab.bench.measure import Timed, gb_per_second, interleave
from ddl.lab.config import PUBLISHED
from train_results import tabulate, to_record

# The recorded configuration. The goals and the paper's numbers hold for it only.
REFERENCE = {"hidden_size": 384, "layers": 6, "heads": 6, "time": 256, "batch": 8, "threads": 2}
# The sizes as a record's name has them.
SHORT = dict(zip(REFERENCE, ("d", "L", "H", "T", "B", "threads"), strict=True))
SMALL = {"hidden_size": 64, "layers": 2, "heads": 2, "time": 32, "batch": 2, "threads": 2}


def main(arguments: Sequence[str] | None = None) -> int:
    args = parse(arguments)
    torch.set_num_threads(args.threads)
    where = record.environment()
    batch = torch.randint(256, (args.batch, args.time), generator=torch.Generator().manual_seed(0))
    candidates: list[Candidate] = []
    copied = {}
    for mode in args.modes:
        built = build(args, mode)
        check_all(built, batch)
        for group in groups(built):
            rates = interleave_group(group, batch, args.rounds, mode)
            copied.setdefault(mode, rates)
            candidates += group
    table = tabulate(candidates, copied, args)
    table.show()
    print(record.describe(where))
    if args.out is not None:
        summary = f"{table.markdown()}\n{record.describe(where)}\n"
        run = where | to_record(candidates, copied, args)
        record.write(record_name(args), run, summary, args.out)
    return 1 if any(c.red for c in candidates) else 0


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    flag = argparse.BooleanOptionalAction
    parser.add_argument("--variants", nargs="+", choices=PUBLISHED, default=list(PUBLISHED))
    parser.add_argument("--eager", action=flag, default=True, help="time eager models")
    parser.add_argument("--compile", action=flag, default=True, help="time compiled models")
    parser.add_argument("--peer", action=flag, default=True, help="time plain PyTorch as well")
    parser.add_argument("--precision", choices=["float32", "autocast"], default="float32")
    parser.add_argument("--anchor-every", type=int, default=1, help="N; 1 stores every state")
    parser.add_argument("--stream-dtype", choices=["bfloat16"], help="of the states")
    parser.add_argument("--adamw", action=flag, default=False, help="include an AdamW step")
    parser.add_argument("--backend", default="inductor", help="of torch.compile")
    parser.add_argument("--quick", action="store_true", help="small sizes, few rounds")
    sizes = parser.add_argument_group("sizes")
    sizes.add_argument("--rounds", type=int, help="timed steps of each: 12, quick: 3")
    sizes.add_argument("--threads", type=int, help="2")
    sizes.add_argument("--hidden-size", type=int, help="384, quick: 64")
    sizes.add_argument("--layers", type=int, help="6, quick: 2")
    sizes.add_argument("--heads", type=int, help="6, quick: 2")
    sizes.add_argument("--time", type=int, help="tokens per sequence: 256, quick: 32")
    sizes.add_argument("--batch", type=int, help="sequences: 8, quick: 2")
    parser.add_argument("--out", type=Path, help="folder of the records (benchmarks/results)")
    args = parser.parse_args(arguments)
    defaults = SMALL | {"rounds": 3} if args.quick else REFERENCE | {"rounds": 12}
    for name, size in defaults.items():
        if getattr(args, name) is None:
            setattr(args, name, size)
        if getattr(args, name) < 1:
            option = name.replace("_", "-")
            parser.error(f"--{option} must be at least 1, got {getattr(args, name)}")
    if not 1 <= args.anchor_every <= 32:
        parser.error(f"--anchor-every must be from 1 to 32, got {args.anchor_every}")
    if args.stream_dtype is not None and args.precision != "autocast":
        parser.error("--stream-dtype needs --precision autocast")
    args.reference = all(getattr(args, name) == size for name, size in REFERENCE.items())
    args.modes = ["eager"] * args.eager + ["compiled"] * args.compile
    if not args.modes:
        parser.error("one of --eager and --compile must be on")
    args.variants = [r for r in PUBLISHED if r == "additive" or r in args.variants]
    if args.out is None and not args.quick:
        args.out = record.RESULTS
    return args


def record_name(args: argparse.Namespace) -> str:
    """The record's name: train_step, and what differs from the recorded configuration."""
    parts = [
        "autocast" * (args.precision == "autocast"),
        f"anchors-{args.anchor_every}" * (args.anchor_every > 1),
        f"stream-{args.stream_dtype}" * (args.stream_dtype is not None),
        "adamw" * args.adamw,
    ]
    if not args.quick:
        sizes = {name: getattr(args, name) for name in REFERENCE}
        parts += [f"{SHORT[n]}{size}" for n, size in sizes.items() if size != REFERENCE[n]]
    return "-".join(["train_step", *filter(None, parts)])


def groups(built: list[Candidate]) -> list[list[Candidate]]:
    """Candidates that are timed in the same rounds.

    Small groups, because the fewer models share a process, the nearer a step is to one of a model
    that trains alone.
    """
    fused, plain = ([c for c in built if c.group == group] for group in ("fused", "plain"))
    if not plain:
        return [fused]
    additive = next(c for c in fused if c.residual == "additive")
    return [fused, [replace(additive, group="plain", seconds=[], compile_seconds=None), *plain]]


def interleave_group(
    candidates: list[Candidate], batch: Tensor, rounds: int, mode: str
) -> dict[str, Any]:
    """Time the candidates that passed, interleaved with copies of a state of m = 4."""

    def timed(candidate: Candidate) -> Timed:
        def run() -> tuple[float, ...]:
            step(candidate, batch)
            started = time.perf_counter()
            step(candidate, batch)
            return (time.perf_counter() - started,)

        return run

    state = torch.ones(*batch.shape, candidates[0].hidden_size, 4)
    steps = {c.name: timed(c) for c in candidates if c.red is None}
    times = interleave(steps | copies(state), rounds, what=mode)
    for candidate in candidates:
        candidate.seconds = [taken for (taken,) in times.get(candidate.name, [])]
        candidate.model.zero_grad(set_to_none=True)
    moved = 2 * state.nbytes
    rates = {n: gb_per_second(moved, [taken for (taken,) in times[n]]) for n in ("copy", "clone")}
    return {"bytes": moved, **{f"{name}_gb_s": rate for name, rate in rates.items()}}


if __name__ == "__main__":
    sys.exit(main())
