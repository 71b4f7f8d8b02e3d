"""Parameters, FLOPs, kept bytes and training steps of every residual on one backbone.

    python benchmarks/streams.py            # the recorded configuration: half an hour
    python benchmarks/streams.py --quick    # the same path in small: minutes, recorded nowhere

A step is zero_grad, forward with loss, backward, in float32. All residuals of a mode are timed in
the same rounds, as in train_step.py, which has more about the residuals of DDL: their floors and
plain PyTorch. Nothing is timed before logits, loss and gradients agree with a float64 copy of the
model, whose delta streams and token reads run on `ddl.reference`; a compiled model also with itself
in eager mode. FLOPs are per token, forward and backward, by formula. Kept: what autograd saves.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from common import record
from common.arguments import make_parser, parse
from common.candidates import backbone_of, compiled
from ddl.lab.bench.agreement import TOLERANCE, check, make, results
from ddl.lab.bench.clock import Clock
from ddl.lab.bench.measure import MismatchError, ratio, ratio_interval
from ddl.lab.bench.oracle import exact
from ddl.lab.bench.row import Stages, time_stages
from ddl.lab.bench.tables import Table, progress
from ddl.lab.config import RESIDUALS
from ddl.models import GPT, flops_per_token
from memory import saved_bytes, step
from train_step import REFERENCE, SMALL

FULL, QUICK = REFERENCE | {"rounds": 12}, SMALL | {"rounds": 3}
Result = dict[str, Any]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = make_parser(__doc__)
    parser.add_argument("--backend", default="inductor", help="of torch.compile")
    args = parse(parser, arguments, full=FULL, quick=QUICK)
    torch.set_num_threads(args.threads)
    where = record.environment()
    batch = torch.randint(256, (args.batch, args.time), generator=torch.Generator().manual_seed(0))
    models = {
        residual: make(replace(backbone_of(args), residual=residual)) for residual in RESIDUALS
    }
    found = {residual: described(model, batch) for residual, model in models.items()}
    for mode in ("eager", "compiled"):
        time_all(models, found, mode, batch, args)
    config = {name: getattr(args, name) for name in FULL}
    run = {"benchmark": "streams", "config": config, "results": list(found.values())}
    record.publish("streams", where, run, tabulate(run), args.out)
    return 1 if any(result["red"] for result in found.values()) else 0


def described(model: GPT, batch: Tensor) -> Result:
    """The results that need no clock, and why a wrong model is not timed."""
    progress(f"checking {model.config.residual}")
    red = difference(model, results(exact(model), batch), batch)
    return {
        "residual": model.config.residual,
        "parameters": model.num_parameters(),
        "flops": flops_per_token(model.config).total,
        "kept": saved_bytes(model, batch),
        "red": red,
    }


def difference(model: nn.Module, expected: dict[str, Tensor], batch: Tensor) -> str | None:
    """How a model's results differ from the expected ones; None if they agree."""
    try:
        check(results(model, batch), expected)
    except MismatchError as found:
        return str(found)
    return None


def time_all(
    models: dict[str, GPT],
    found: dict[str, Result],
    mode: str,
    batch: Tensor,
    args: argparse.Namespace,
) -> None:
    """Add the times of a mode to the results; those of a model that is wrong stay away."""
    stages: dict[str, Stages] = {}
    for residual, model in models.items():
        timed: nn.Module = model
        if mode == "compiled":
            progress(f"compiling {residual}")
            timed = compiled(model, args.backend)
            found[residual]["red"] = found[residual]["red"] or difference(
                timed, results(model, batch), batch
            )
        if found[residual]["red"] is None:
            stages[residual] = [partial(step, timed, batch)] * 2  # the second is timed
    state = 4 * 4 * batch.numel() * args.hidden_size  # bytes of a state of m = 4, copied each round
    clock = Clock(torch.device("cpu"), state)
    taken = time_stages(stages, clock, args.rounds, mode)
    base = [times[2] for times in taken.get("additive", [])]
    for residual, times in taken.items():
        seconds = [second for _, _, second in times]
        found[residual][mode] = {"median": statistics.median(seconds), "seconds": seconds}
        if base:
            found[residual][mode] |= {
                "ratio": ratio(base, seconds),
                "interval": ratio_interval(base, seconds),
            }


def tabulate(run: dict[str, Any]) -> Table:
    config, results = run["config"], run["results"]
    columns = ("residual", "parameters", "MFLOP/token", "kept MB", "eager ms", "compiled ms")
    sizes = f"d {config['hidden_size']}, {config['layers']} layers"
    title = f"Residual streams, float32, {sizes}, T {config['time']}, B {config['batch']}"
    table = Table(title, (*columns[:5], "ratio", columns[5], "ratio "))
    for result in results:
        times = [cell for mode in ("eager", "compiled") for cell in time_cells(result.get(mode))]
        table.add(
            result["residual"],
            f"{result['parameters']:,}",
            f"{result['flops'] / 1e6:.1f}",
            f"{result['kept'] / 1e6:.1f}",
            *times,
        )
    table.notes += [f"{r['residual']} is red: {r['red']}" for r in results if r["red"]]
    table.notes.append(
        "ratio: of medians over the additive residual's, in the same rounds; more is faster."
        f" Tolerance of the check: {TOLERANCE:g}."
    )
    return table


def time_cells(times: dict[str, Any] | None) -> tuple[str, str]:
    if times is None:
        return "–", "–"
    low, high = times.get("interval", (1, 1))
    return f"{1e3 * times['median']:.1f}", f"{times.get('ratio', 1):.2f} ({low:.2f}–{high:.2f})"


if __name__ == "__main__":
    sys.exit(main())
