"""Tokens per second of cached generation, against the additive residual.

    python benchmarks/decode.py            # minutes
    python benchmarks/decode.py --quick    # the same path in small: seconds, recorded nowhere

Every residual has the same backbone and continues the same prompts, one token of each sequence per
step, interleaved in one process. First the cached step of each model must give the same logits as
the whole sequence without a cache. A model that fails is reported red, without times, and the exit
status is 1.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from common import record
from common.measure import RedGateError, Timed, gate, interleave, ratio, ratio_interval
from common.report import Table
from ddl.config import RESIDUALS
from ddl.models import GPT, Cache, GPTConfig

TOLERANCE = 1e-5  # of the logits' rms, float32


def main(arguments: Sequence[str] | None = None) -> int:
    args = parse(arguments)
    torch.set_num_threads(args.threads)
    where = record.environment()
    models = {residual: build(residual, args) for residual in RESIDUALS}
    results = [result for batch in args.batches for result in measure(models, batch, args)]
    table = tabulate(results, args)
    table.show()
    print(record.describe(where))
    if args.out is not None:
        config = {k: v for k, v in vars(args).items() if k not in ("out", "batches", "threads")}
        run = {"benchmark": "decode", "config": config, "results": results}
        record.write(
            "decode", where | run, f"{table.markdown()}\n{record.describe(where)}\n", args.out
        )
    return 1 if any(result["red"] for result in results) else 0


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 16], help="sequences")
    parser.add_argument("--hidden-size", type=int, help="d (384, quick: 32)")
    parser.add_argument("--layers", type=int, help="(6, quick: 1)")
    parser.add_argument("--prompt", type=int, help="tokens of every prompt (64, quick: 4)")
    parser.add_argument("--tokens", type=int, help="that each sequence gets (128, quick: 8)")
    parser.add_argument("--rounds", type=int, help="generations that are timed (9, quick: 2)")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--quick", action="store_true", help="small models, few rounds")
    parser.add_argument("--out", type=Path, help="folder of the records (benchmarks/results)")
    args = parser.parse_args(arguments)
    small = {"hidden_size": 32, "layers": 1, "prompt": 4, "tokens": 8, "rounds": 2}
    full = {"hidden_size": 384, "layers": 6, "prompt": 64, "tokens": 128, "rounds": 9}
    for name, value in (small if args.quick else full).items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    numbers = (*args.batches, args.layers, args.prompt, args.tokens, args.rounds, args.threads)
    if min(numbers) <= 0 or args.hidden_size % 32 != 0:
        parser.error("all numbers must be positive, --hidden-size a multiple of 32")
    if args.out is None and not args.quick:
        args.out = record.RESULTS
    return args


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


@torch.no_grad()
def check(model: GPT, idx: torch.Tensor) -> None:
    """Raise RedGateError unless a cached step gives the logits of the whole sequence."""
    cache = Cache(model.config)
    model(idx[:, :-1], cache=cache)
    step, whole = model(idx[:, -1:], cache=cache).logits, model(idx, last=1).logits
    gate({"logits of a cached step": (step, whole)}, TOLERANCE)


def stopwatch(model: GPT, idx: torch.Tensor, tokens: int) -> Timed:
    """Times two parts: the prompt with the first token, and the tokens after it."""

    def run() -> tuple[float, ...]:
        times = [time.perf_counter()]
        model.generate(
            idx, tokens, temperature=0, progress=lambda: times.append(time.perf_counter())
        )
        return times[1] - times[0], times[-1] - times[1]

    return run


def measure(models: dict[str, GPT], batch: int, args: argparse.Namespace) -> list[dict[str, Any]]:
    """The results of one batch size as JSON types."""
    idx, steps, red = prompts(batch, args), {}, {}
    for name, model in models.items():
        try:
            check(model, idx)
            steps[name] = stopwatch(model, idx, args.tokens)
        except RedGateError as difference:
            red[name] = str(difference)
    what = f"batch {batch}"
    seconds = interleave(steps, args.rounds, warmup=1, what=what) if steps else {}
    results = []
    for name in models:
        result: dict[str, Any] = {"residual": name, "batch": batch, "red": red.get(name)}
        if name in seconds and "additive" in seconds:
            prompt, decode = (list(column) for column in zip(*seconds[name], strict=True))
            base = [decode for _, decode in seconds["additive"]]
            result |= {
                "prompt_seconds": prompt,
                "decode_seconds": decode,
                "tokens_per_second": batch * (args.tokens - 1) / sorted(decode)[len(decode) // 2],
                "ratio": ratio(base, decode),
                "interval": ratio_interval(base, decode),
            }
        results.append(result)
    return results


def tabulate(results: list[dict[str, Any]], args: argparse.Namespace) -> Table:
    table = Table(
        f"Cached generation: d {args.hidden_size}, {args.layers} layers, {args.tokens} tokens "
        f"after {args.prompt}, float32, {args.threads} threads",
        ("residual", "batch", "tokens/s", "× additive", "95 %"),
    )
    for r in results:
        cells = [r["residual"], f"{r['batch']}"]
        if r["red"] or "ratio" not in r:
            table.add(*cells, "RED", "", "")
            table.notes.append(f"RED, not timed: {r['residual']}: {r['red']}")
            continue
        low, high = r["interval"]
        speed = f"{r['tokens_per_second']:,.0f}"
        table.add(*cells, speed, f"{r['ratio']:.3f}", f"{low:.3f}–{high:.3f}")
    table.notes.append(
        f"tokens/s: of all sequences together, at the median of {args.rounds} interleaved rounds; "
        "× additive: ratio of medians, higher is faster."
    )
    return table


if __name__ == "__main__":
    sys.exit(main())
