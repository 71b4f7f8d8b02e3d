"""Bytes that a training step keeps for its backward, and its peak, against the additive residual.

    python benchmarks/memory.py            # the recorded configuration: minutes
    python benchmarks/memory.py --quick    # the same path in small: seconds, recorded nowhere

Every residual has the same backbone. Kept: the distinct storages that autograd saves, parameters
apart. Peak: the most that torch's allocator held during the step, beyond what was there before it.
Beside what is kept stands what the formula in `stream_bytes` predicts from the additive model.
Nothing is timed, so the load of the machine does not matter.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from common import record
from common.candidates import compiled
from ddl.lab.bench.agreement import make
from ddl.lab.bench.tables import Table, progress
from ddl.lab.config import PUBLISHED, STREAMS, GPTConfig


class Kept(NamedTuple):
    """Bytes of one training step."""

    saved: int
    peak: int


def main(arguments: Sequence[str] | None = None) -> int:
    args = parse(arguments)
    torch.set_num_threads(args.threads)
    where = record.environment()
    results = [result for mode in args.modes for result in measure_all(args, mode)]
    table = tabulate(results, args)
    table.show()
    print(record.describe(where))
    if args.out is not None:
        sizes = {name: getattr(args, name) for name in ("hidden_size", "layers", "time", "batch")}
        run = where | {"benchmark": "memory", "config": sizes, "results": results}
        summary = f"{table.markdown()}\n{record.describe(where)}\n"
        record.write("memory", run, summary, args.out)
    return 0


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--residuals", nargs="+", choices=PUBLISHED, default=list(PUBLISHED))
    parser.add_argument("--channels", nargs="+", type=int, default=[4, 16], help="m (4 16)")
    parser.add_argument("--anchors", nargs="+", type=int, default=[1, 2, 4, 8, 16], help="N")
    parser.add_argument("--modes", nargs="+", choices=["eager", "compiled"])
    parser.add_argument("--hidden-size", type=int, help="d (384, quick: 64)")
    parser.add_argument("--layers", type=int, help="blocks (6, quick: 2)")
    parser.add_argument("--time", type=int, help="tokens per sequence (256, quick: 32)")
    parser.add_argument("--batch", type=int, help="sequences (8, quick: 2)")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--quick", action="store_true", help="small models, eager only")
    parser.add_argument("--out", type=Path, help="folder of the records (benchmarks/results)")
    args = parser.parse_args(arguments)
    small = {"hidden_size": 64, "layers": 2, "time": 32, "batch": 2, "modes": ["eager"]}
    full = {"hidden_size": 384, "layers": 6, "time": 256, "batch": 8}
    for name, value in (small if args.quick else full | {"modes": ["eager", "compiled"]}).items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    numbers = (*args.channels, *args.anchors, args.layers, args.time, args.batch, args.threads)
    if min(numbers) <= 0 or max(args.anchors) > 32 or args.hidden_size % 32 != 0:
        parser.error("numbers must be positive, anchors at most 32, --hidden-size a multiple of 32")
    if args.out is None and not args.quick:
        args.out = record.RESULTS
    return args


# --- models ---------------------------------------------------------------------------------------


def configurations(args: argparse.Namespace) -> Iterator[GPTConfig]:
    """The additive model, then every residual with every m and N."""
    backbone = GPTConfig(
        residual="additive",
        vocab_size=256,
        block_size=args.time,
        num_layers=args.layers,
        num_heads=args.hidden_size // 32,
        hidden_size=args.hidden_size,
    )
    yield backbone
    for residual in args.residuals:
        if residual == "additive":
            continue
        for m in [4] if residual == "ddl" else args.channels:
            for anchor_every in args.anchors:
                yield replace(
                    backbone, residual=residual, value_channels=m, anchor_every=anchor_every
                )


def measure_all(args: argparse.Namespace, mode: str) -> list[dict[str, Any]]:
    batch = torch.randint(256, (args.batch, args.time), generator=torch.Generator().manual_seed(0))
    results: list[dict[str, Any]] = []
    for config in configurations(args):
        m = channels(config)
        progress(f"{mode} {config.residual} m={m} N={config.anchor_every or 1}")
        model = make(config)
        kept = measure(model if mode == "eager" else compiled(model, "inductor"), batch)
        additive = results[0] if results else {"saved": kept.saved, "peak": kept.peak}
        results.append({
            "mode": mode,
            "residual": config.residual,
            "value_channels": m,
            "anchor_every": config.anchor_every or 1,
            "saved": kept.saved,
            "peak": kept.peak,
            "saved_over_additive": kept.saved / additive["saved"],
            "peak_over_additive": kept.peak / additive["peak"],
            "formula": additive["saved"] + more_than_additive(config, batch),
        })  # fmt: skip
    return results


def channels(config: GPTConfig) -> int:
    return config.value_channels if config.residual not in ("additive", "ddl") else 1


# --- the formula ----------------------------------------------------------------------------------


def more_than_additive(config: GPTConfig, batch: Tensor) -> int:
    """Return the bytes that a float32 model keeps beyond those of the additive one."""
    if config.residual == "additive":
        return 0
    tokens = batch.numel()
    d, sublayers = config.hidden_size, 2 * config.num_layers
    # Eager, the additive model keeps the stream before each norm, 1/rms, and the norm before γ.
    additive = (sublayers + 1) * (2 * d + 1)
    return 4 * tokens * (stream_numbers(config) - additive)


def stream_numbers(config: GPTConfig) -> int:
    """Return the numbers per token that a delta stream keeps, besides what its sublayers keep."""
    d, m, sublayers = config.hidden_size, channels(config), 2 * config.num_layers
    compress, expand = STREAMS[config.residual]
    states = math.ceil(sublayers / (config.anchor_every or 1)) * d * m
    # Of each rewrite: k, v, β, r and p. Of each read: 1/rms, and x if it looks back in time.
    rewrites = sublayers * (d + m + 1 + 1 + m)
    reads = (sublayers + 1) * (1 + d * (compress == "token"))
    return states + rewrites + reads + d * (expand == "conv")  # the embedding


# --- measuring ------------------------------------------------------------------------------------


def measure(model: nn.Module, batch: Tensor) -> Kept:
    """Return what the second step keeps, and its peak; the first one compiles and allocates."""
    step(model, batch)
    saved = saved_bytes(model, batch)
    model.zero_grad(set_to_none=True)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as run:
        step(model, batch)
    return Kept(saved, peak_bytes(run))


def step(model: nn.Module, batch: Tensor) -> None:
    model.zero_grad(set_to_none=True)
    model(batch, labels=batch).loss.backward()


def saved_bytes(model: nn.Module, batch: Tensor) -> int:
    """Return the bytes of the distinct storages that a forward saves for its backward."""
    known = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept: dict[int, Tensor] = {}  # alive, so that no address is used twice

    def pack(tensor: Tensor) -> Tensor:
        kept.setdefault(tensor.untyped_storage().data_ptr(), tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = model(batch, labels=batch).loss
    loss.backward()
    return sum(t.untyped_storage().nbytes() for at, t in kept.items() if at not in known)


def peak_bytes(run: profile) -> int:
    """Return the most bytes that were allocated and not freed again at any time of the run."""
    events = [e for e in run.profiler.kineto_results.events() if e.name() == "[memory]"]
    held = most = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()
        most = max(most, held)
    return most


def tabulate(results: list[dict[str, Any]], args: argparse.Namespace) -> Table:
    table = Table(
        f"Memory of a training step, float32, d {args.hidden_size}, {args.layers} layers, "
        f"T {args.time}, B {args.batch}",
        [
            "mode",
            "residual",
            "m",
            "N",
            "kept MB",
            "× additive",
            "formula",
            "peak MB",
            "× additive ",
        ],
        labels=2,
    )
    for result in results:
        table.add(
            result["mode"],
            result["residual"],
            str(result["value_channels"]),
            str(result["anchor_every"]),
            f"{result['saved'] / 1e6:.1f}",
            f"{result['saved_over_additive']:.3f}",
            f"{result['saved'] / result['formula']:.3f}",
            f"{result['peak'] / 1e6:.1f}",
            f"{result['peak_over_additive']:.3f}",
        )
    table.notes.append("formula: kept, over what `more_than_additive` predicts for an eager model.")
    return table


if __name__ == "__main__":
    sys.exit(main())
