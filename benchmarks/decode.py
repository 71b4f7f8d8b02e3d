"""Tokens per second of cached generation, against the additive residual.

    python benchmarks/decode.py            # minutes
    python benchmarks/decode.py --quick    # the same path in small: seconds, recorded nowhere

Every residual has the same backbone and continues the same prompts, one token of each sequence per
step, interleaved in one process: through GPT.generate, and through generate of transformers, which
has an overhead of its own. First the cached step of each model must give the same logits as
the whole sequence without a cache. A model that fails is reported red, without times, and the exit
status is 1.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import time
from collections.abc import Sequence
from typing import Any

import torch
from transformers.generation.streamers import BaseStreamer

from common import record
from common.arguments import make_parser, parse
from ddl.hf import from_gpt
from ddl.lab.bench.agreement import check_cache
from ddl.lab.bench.measure import MismatchError, Timed, interleave, ratio, ratio_interval
from ddl.lab.bench.tables import Table
from ddl.lab.config import PUBLISHED
from ddl.models import GPT, GPTConfig

# prompt, tokens: of each sequence. rounds: generations that are timed.
FULL = {
    "batches": [1, 16], "hidden_size": 384, "layers": 6, "prompt": 64, "tokens": 128, "rounds": 21,
    "threads": 2,
}  # fmt: skip
QUICK = FULL | {"hidden_size": 32, "layers": 1, "prompt": 4, "tokens": 8, "rounds": 2}
# The least tokens/s over the additive model's, by batch: m = 1, channel read, token read.
GOALS = {1: (0.97, 0.97, 0.95), 16: (0.98, 0.96, 0.95)}
READS = {"ddl": 0, "ddl-cc": 1, "ddl-cc-noec": 1, "ddl-tc": 2, "ddl-tc-noec": 2}
INTERFACES = ("ddl", "transformers")


def main(arguments: Sequence[str] | None = None) -> int:
    args = parse(make_parser(__doc__), arguments, full=FULL, quick=QUICK)
    torch.set_num_threads(args.threads)
    where = record.environment()
    models = {residual: build(residual, args) for residual in PUBLISHED}
    results = [result for batch in args.batches for result in measure(models, batch, args)]
    config = {k: v for k, v in vars(args).items() if k not in ("out", "batches", "threads")}
    run = {"benchmark": "decode", "config": config, "results": results}
    record.publish("decode", where, run, tabulate(results, args), args.out)
    return 1 if any(result["red"] for result in results) else 0


def build(residual: str, args: argparse.Namespace) -> GPT:
    torch.manual_seed(0)
    config = GPTConfig(
        residual=residual,
        vocab_size=256,
        block_size=args.prompt + args.tokens,
        num_layers=args.layers,
        num_heads=max(1, args.hidden_size // 64),
        hidden_size=args.hidden_size,
    )
    return GPT(config).eval()


def prompts(batch: int, args: argparse.Namespace) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(256, (batch, args.prompt), generator=generator)


class Clock(BaseStreamer):
    """Notes when the prompt is taken and when each token is there."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, value: Any = None) -> None:
        self.times.append(time.perf_counter())

    def end(self) -> None:
        pass


def stopwatch(model: GPT, interface: str, idx: torch.Tensor, tokens: int) -> Timed:
    """Times two parts: the prompt with the first token, and the tokens after it."""
    wrapped = from_gpt(model) if interface == "transformers" else None

    def run() -> tuple[float, ...]:
        clock = Clock()
        if wrapped is None:
            clock.put()
            model.generate(idx, tokens, temperature=0, progress=clock.put)
        else:  # transformers gives the prompt to the streamer first
            options: dict[str, Any] = {"min_new_tokens": tokens, "max_new_tokens": tokens}
            wrapped.generate(
                idx, attention_mask=torch.ones_like(idx), do_sample=False, streamer=clock, **options
            )
        start, first, *_, last = clock.times
        return first - start, last - first

    return run


def measure(models: dict[str, GPT], batch: int, args: argparse.Namespace) -> list[dict[str, Any]]:
    """The results of one batch size as JSON types."""
    idx, steps, red = prompts(batch, args), {}, {}
    for name, model in models.items():
        try:
            check_cache(model, idx)
        except MismatchError as difference:
            red[name] = str(difference)
            continue
        for interface in INTERFACES:
            steps[name, interface] = stopwatch(model, interface, idx, args.tokens)
    what = f"batch {batch}"
    seconds = interleave(steps, args.rounds, warmup=1, what=what) if steps else {}
    times = {
        key: [list(column) for column in zip(*rows, strict=True)] for key, rows in seconds.items()
    }
    results = []
    for interface, name in itertools.product(INTERFACES, models):
        if name in red and interface != "ddl":
            continue  # it is reported once
        result: dict[str, Any] = {
            "residual": name, "interface": interface, "batch": batch, "red": red.get(name)
        }  # fmt: skip
        if (name, interface) in times and ("additive", interface) in times:
            prompt, decode = times[name, interface]
            base, own = times["additive", interface][1], times[name, "ddl"][1]
            result |= {
                "prompt_seconds": prompt,
                "decode_seconds": decode,
                "tokens_per_second": batch * (args.tokens - 1) / sorted(decode)[len(decode) // 2],
                "ratio": ratio(base, decode),
                "interval": ratio_interval(base, decode),
                "of_own": ratio(own, decode),
            }
        results.append(result)
    return results


def goal_of(residual: str, batch: int, args: argparse.Namespace) -> float | None:
    at_size = not args.quick and (args.hidden_size, args.layers) == (384, 6)
    if residual not in READS or batch not in GOALS or not at_size:
        return None
    return GOALS[batch][READS[residual]]


def tabulate(results: list[dict[str, Any]], args: argparse.Namespace) -> Table:
    table = Table(
        f"Cached generation: d {args.hidden_size}, {args.layers} layers, {args.tokens} tokens "
        f"after {args.prompt}, float32, {args.threads} threads",
        ("residual", "interface", "batch", "tokens/s", "× additive", "95 %", "goal", "× own"),
    )
    for r in results:
        cells = [r["residual"], r["interface"], f"{r['batch']}"]
        if r["red"] or "ratio" not in r:
            table.add(*cells, "RED", "", "", "", "")
            table.notes.append(f"RED, not timed: {r['residual']}: {r['red']}")
            continue
        low, high = r["interval"]
        goal = goal_of(r["residual"], r["batch"], args)
        mark = "" if goal is None else " ✓" if high >= goal else " ✗"
        table.add(
            *cells,
            f"{r['tokens_per_second']:,.0f}",
            f"{r['ratio']:.3f}{mark}",
            f"{low:.3f}–{high:.3f}",
            "" if goal is None else f"{goal:.2f}",
            "" if r["interface"] == "ddl" else f"{r['of_own']:.3f}",
        )
    table.notes.append(
        f"tokens/s: of all sequences together, at the median of {args.rounds} interleaved rounds; "
        "× additive: ratio of medians, through the same interface, higher is faster, ✓ if the "
        "interval's upper end reaches the goal; × own: tokens/s over those of GPT.generate."
    )
    return table


if __name__ == "__main__":
    sys.exit(main())
