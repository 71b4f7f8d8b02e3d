"""All GPU measurements in one command, in less than 8 minutes on an H100.

    python benchmarks/gpu                          # all parts, into benchmarks/results
    python benchmarks/gpu --only ops,train         # some of them
    python benchmarks/gpu --only ops --sizes 4096 --channels 4
    python benchmarks/gpu --quick                  # tiny sizes: seconds, recorded nowhere
    python benchmarks/gpu --quick --device cpu     # the same code where there is no GPU

It needs the installed wheel, PyTorch and the folder benchmarks/, but no Rust. First every operator
and model must agree with ddl.reference or plain PyTorch on the device, at the sizes to be timed.
One that fails is reported red, without times, and the exit status is 1. Every record is written to
gpu.jsonl at once, so an interrupted run keeps its measurements. The parts run in the order of their
importance; those that --minutes leaves no time for are named at the end.

    copy             bandwidth of device-to-device copies, by size
    compile          all kernels of `ops`, side by side
    ops              every operator: microseconds, GB/s, share of the copy; d, m, types of the state
    launch           microseconds of the host per call
    train            training steps, additive against every variant; speed and peak memory
    prefill          a prompt to its first token
    plain            `ops` in plain PyTorch, eager, beside the fused operators
    train-compiled   `train` under torch.compile
    plain-compiled   `plain` under torch.compile
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

import ddl.cuda
from common import record
from common.measure import gb_per_second, interleave
from common.report import progress
from ddl.config import PRESETS, RESIDUALS
from gpu import report
from gpu.clock import Clock, describe
from gpu.launch import launches
from gpu.log import Budget, Line, Log
from gpu.models import Setting
from gpu.ops import cases, compile_ahead, full_name, interleave_forms, plain_forms
from gpu.train import prefill, train

MAIN = ("additive", "ddl", "ddl-cc", "ddl-tc")
# Sequences of 1,024 tokens that a GPU of 80 GB has memory for.
BATCHES = {"small": 32, "medium": 16}
FULL = {
    "sizes": (768, 1024, 2048, 4096),
    "channels": (1, 4, 8),
    "batch": 32,
    "time": 1024,
    "rounds": 10,
    "calls": 200,
    "copy_bytes": 2**31,
    "prefill": (1, 16),
    "backend": "inductor",
}
QUICK = FULL | {
    "sizes": (32,),
    "channels": (1, 4),
    "batch": 2,
    "time": 24,
    "rounds": 3,
    "calls": 3,
    "copy_bytes": 2**20,
    "prefill": (1, 2),
    "backend": "aot_eager",
}

Pieces = dict[str, Callable[[], list[Line]]]


def main(arguments: Sequence[str] | None = None) -> int:
    args = parse(arguments)
    budget = Budget(args.minutes)
    torch.backends.cudnn.allow_tf32 = False  # float32 convolutions in float32, not in TF32
    device = torch.device("cuda", 0) if args.device == "cuda" else torch.device("cpu")
    where = record.environment() | describe(device)
    where["plan"] = os.environ.get("DDL_PLAN", "")  # overrides of the planner (README.md)
    if args.commit is not None:
        where["commit"] = {"hash": args.commit, "dirty": False}
    log = Log(where, None if args.out is None else args.out / "gpu.jsonl")
    config = {name: getattr(args, name) for name in FULL}
    log.write("run", config=config | {"only": args.only}, **where)
    clock = Clock(device, args.copy_bytes)
    for part, (pieces, expected) in parts(args, clock, where["device"]).items():
        if part in args.only:
            budget.run(log, part, pieces, expected)
            progress("")
            print(f"{part}: done after {budget.spent:.0f} s", flush=True)
    return show_report(log, where, args)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", type=lambda text: text.split(","), help="parts, by commas")
    parser.add_argument("--sizes", type=numbers, help="hidden sizes d of `ops`, by commas")
    parser.add_argument("--channels", type=numbers, help="value channels m of `ops`, by commas")
    parser.add_argument("--minutes", type=float, default=7.5, help="for everything (7.5)")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--quick", action="store_true", help="tiny sizes, few rounds")
    parser.add_argument("--out", type=Path, help="folder of the records (benchmarks/results)")
    parser.add_argument(
        "--commit", help="commit that the wheel was built from, if this is no repository"
    )
    args = parser.parse_args(arguments)
    args.only = PARTS if args.only is None else args.only
    for part in args.only:
        if part not in PARTS:
            parser.error(f"--only must name parts, which are {', '.join(PARTS)}, got {part!r}")
    if args.device == "cuda" and (reason := ddl.cuda.why_unavailable(0)):
        parser.error(f"--device cuda cannot be used: {reason}")
    if args.out is None and not args.quick:
        args.out = record.RESULTS
    chosen = {name: given for name, given in vars(args).items() if given is not None}
    vars(args).update((QUICK if args.quick else FULL) | chosen)
    return args


def numbers(text: str) -> tuple[int, ...]:
    return tuple(int(number) for number in text.split(","))


PARTS = (
    "copy", "compile", "ops", "launch", "train", "prefill", "plain", "train-compiled",
    "plain-compiled",
)  # fmt: skip


def parts(
    args: argparse.Namespace, clock: Clock, device_name: str
) -> dict[str, tuple[Pieces, float]]:
    """The pieces of every part, and the seconds that a first piece is expected to take."""
    every, rounds = cases(args), args.rounds
    timed = {"clock": clock, "rounds": rounds, "backend": args.backend}
    goals = report.ratio_goals(device_name)
    run = partial(train, clock=clock, rounds=rounds, goals=goals)

    def ops(forms: Callable[..., list[str]]) -> Pieces:
        return {
            full_name(case): partial(interleave_forms, case, forms(case), **timed) for case in every
        }

    def trained(chosen: list[Setting]) -> Pieces:
        return {setting.name: partial(run, setting) for setting in chosen}

    eager, compiled = settings(args, "eager"), settings(args, "compiled")
    prompts = [setting for setting in eager if setting.precision == "bfloat16"]
    filled = partial(prefill, clock=clock, rounds=rounds, batches=args.prefill)
    return {
        "copy": ({"copy": lambda: bandwidth(clock, rounds)}, 5),
        "compile": ({"compile": lambda: compile_ahead(every, clock.device)}, 30),
        "ops": (ops(lambda case: ["fused"]), 2),
        "launch": ({"launch": lambda: launches(clock, args.calls, rounds)}, 10),
        "train": (trained(eager), 20),
        "prefill": ({s.name: partial(filled, s) for s in prompts}, 10),
        "plain": (ops(lambda case: ["fused", *plain_forms(case)]), 2),
        "train-compiled": (trained(compiled[:1]), 45 * len(MAIN)),
        "plain-compiled": (ops(lambda case: ["fused", "compiled broadcasts"]), 10),
    }


def settings(args: argparse.Namespace, mode: str) -> list[Setting]:
    """The trained models: the papers' two sizes in two precisions."""
    chosen = []
    for preset, batch in BATCHES.items():
        config = PRESETS["tiny" if args.quick else preset].model
        config = replace(config, num_layers=1, block_size=args.time) if args.quick else config
        most = args.batch if args.quick else batch
        for precision in ("autocast", "bfloat16"):
            residuals = RESIDUALS if mode == "eager" else MAIN
            chosen.append(Setting(preset, config, residuals, precision, mode, most, args.backend))
    return chosen


def bandwidth(clock: Clock, rounds: int) -> list[Line]:
    """GB/s, read and written, of copies of three sizes. The largest is the clock's own."""
    lines = []
    for shift in (4, 2, 0):
        part = Clock(clock.device, clock.copy_bytes >> shift)
        seconds = interleave({"copy": part.timed()}, 3 * rounds, what="copy")["copy"]
        rate = gb_per_second(part.copied_bytes, [taken for (taken,) in seconds])
        moved = part.copied_bytes
        lines.append({"what": f"copy of {moved // 2} bytes", "bytes": moved, "gb_s": rate})
    return lines


def show_report(log: Log, where: Line, args: argparse.Namespace) -> int:
    """Print the tables and write them beside the records. Returns 1 if anything went wrong."""
    tables = report.tables(log.lines)
    machine = f"{where['device']}, driver {where['driver']} · {record.describe(where)}"
    machine += f" · DDL_PLAN={where['plan']}" if where["plan"] else ""
    closing = "\n".join([*report.remarks(log), machine])
    for table in tables:
        table.show()
    print(closing)
    if args.out is not None:
        summary = "\n".join([*(table.markdown() for table in tables), closing, ""])
        (args.out / "gpu.md").write_text(summary, encoding="utf-8")
    return 1 if log.faults else 0
