"""Training steps of every residual on one backbone, against the additive one and plain PyTorch.

    python benchmarks/train_step.py            # the recorded configuration: a quarter of an hour
    python benchmarks/train_step.py --quick    # the same path in small: seconds, recorded nowhere
    python benchmarks/train_step.py --precision autocast --stream-dtype bfloat16 --no-peer

Each precision, anchor_every, stream_dtype and size has a record of its own in benchmarks/results.

A step is zero_grad(set_to_none), forward with loss, backward. The models of one mode (eager or
compiled) are timed in interleaved rounds in one process. The fused models form one group and plain
PyTorch's another; each group contains the additive model. In a round every model runs two steps and
only the second is timed, because the first one restores the memory and caches that a model would
have if it trained alone. Before anything is timed, logits, loss and all gradients of every form of
a variant must agree with plain PyTorch in eager mode, at the sizes that are timed. If one form of a
variant fails, none of its forms is timed and the exit status is 1. Under autocast their gradients
must stay near those in float32.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from common import record
from common.arguments import make_parser, parse
from common.candidates import Candidate, build, check_all, step
from ddl.lab.bench.clock import Clock
from ddl.lab.bench.row import Stages, copy_rate, time_stages
from ddl.lab.config import PUBLISHED
from train_results import tabulate, to_record

# The recorded configuration. The goals and the paper's numbers hold for it only.
REFERENCE = {"hidden_size": 384, "layers": 6, "heads": 6, "time": 256, "batch": 8, "threads": 2}
# The sizes as a record's name has them.
SHORT = dict(zip(REFERENCE, ("d", "L", "H", "T", "B", "threads"), strict=True))
SMALL = {"hidden_size": 64, "layers": 2, "heads": 2, "time": 32, "batch": 2, "threads": 2}


def main(arguments: Sequence[str] | None = None) -> int:
    args = arguments_of(arguments)
    torch.set_num_threads(args.threads)
    where = record.environment()
    batch = torch.randint(256, (args.batch, args.time), generator=torch.Generator().manual_seed(0))
    candidates: list[Candidate] = []
    copied: dict[str, dict[str, float]] = {}
    for mode in args.modes:
        built = build(args, mode)
        check_all(built, batch)
        for group in groups(built):
            if rate := time_group(group, batch, args.rounds, mode):
                copied.setdefault(mode, rate)
            candidates += group
    table, run = tabulate(candidates, copied, args), to_record(candidates, copied, args)
    record.publish(record_name(args), where, run, table, args.out)
    return 1 if any(c.red for c in candidates) else 0


def arguments_of(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser, flag = make_parser(__doc__), argparse.BooleanOptionalAction
    parser.add_argument("--variants", nargs="+", choices=PUBLISHED, default=list(PUBLISHED))
    parser.add_argument("--eager", action=flag, default=True, help="time eager models")
    parser.add_argument("--compile", action=flag, default=True, help="time compiled models")
    parser.add_argument("--peer", action=flag, default=True, help="time plain PyTorch as well")
    parser.add_argument("--precision", choices=["float32", "autocast"], default="float32")
    parser.add_argument("--anchor-every", type=int, default=1, help="N; 1 stores every state")
    parser.add_argument("--stream-dtype", choices=["bfloat16"], help="of the states")
    parser.add_argument("--backend", default="inductor", help="of torch.compile")
    full, quick = REFERENCE | {"rounds": 12}, SMALL | {"rounds": 3}
    args = parse(parser, arguments, full=full, quick=quick)
    if not 1 <= args.anchor_every <= 32:
        parser.error(f"--anchor-every must be from 1 to 32, got {args.anchor_every}")
    if args.stream_dtype is not None and args.precision != "autocast":
        parser.error("--stream-dtype needs --precision autocast")
    args.reference = all(getattr(args, name) == size for name, size in REFERENCE.items())
    args.modes = ["eager"] * args.eager + ["compiled"] * args.compile
    if not args.modes:
        parser.error("one of --eager and --compile must be on")
    args.variants = [r for r in PUBLISHED if r == "additive" or r in args.variants]
    return args


def record_name(args: argparse.Namespace) -> str:
    """The record's name: train_step, and what differs from the recorded configuration."""
    parts = [
        "autocast" * (args.precision == "autocast"),
        f"anchors-{args.anchor_every}" * (args.anchor_every > 1),
        f"stream-{args.stream_dtype}" * (args.stream_dtype is not None),
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


def time_group(
    candidates: list[Candidate], batch: Tensor, rounds: int, mode: str
) -> dict[str, float]:
    """Time the candidates that passed, each behind a copy of a state of m = 4.

    Returns the bytes and the rate of that copy; {} if none passed.
    """
    clock = Clock(torch.device("cpu"), 4 * 4 * batch.numel() * candidates[0].hidden_size)
    twice: dict[str, Stages] = {
        c.name: [partial(step, c, batch)] * 2 for c in candidates if c.red is None
    }
    taken = time_stages(twice, clock, rounds, mode)
    for candidate in candidates:
        candidate.seconds = [second for _, _, second in taken.get(candidate.name, [])]
        candidate.model.zero_grad(set_to_none=True)
    if not taken:
        return {}
    return {"bytes": clock.copied_bytes, "copy_gb_s": copy_rate(taken, clock)}


if __name__ == "__main__":
    sys.exit(main())
