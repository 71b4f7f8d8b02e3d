"""Bytes that a training step keeps for its backward, and its peak, against the additive residual.

    python benchmarks/memory.py            # the recorded configuration: minutes
    python benchmarks/memory.py --quick    # the same path in small: seconds, recorded nowhere

Every residual has the same backbone. Kept: the distinct storages that autograd saves, parameters
and tables of positions apart. Peak: the most that torch's allocator held during the step, beyond
what was there before it. Beside what is kept stands what the formula of scale/activations.py
predicts for an eager model. Nothing is timed, so the load of the machine does not matter.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from common import record
from common.arguments import make_parser, parse
from common.candidates import compiled
from ddl.lab.bench.agreement import make
from ddl.lab.bench.tables import Table, progress
from ddl.lab.config import PUBLISHED, GPTConfig, TrainConfig
from scale.activations import kept
from scale.parameters import channels

FULL = {
    "channels": [4, 16],  # m
    "anchors": [1, 2, 4, 8, 16],  # N
    "hidden_size": 384,
    "layers": 6,
    "time": 256,
    "batch": 8,
    "threads": 2,
}
QUICK = FULL | {"hidden_size": 64, "layers": 2, "time": 32, "batch": 2}


class Kept(NamedTuple):
    """Bytes of one training step."""

    saved: int
    peak: int


def main(arguments: Sequence[str] | None = None) -> int:
    args = parse(make_parser(__doc__), arguments, full=FULL, quick=QUICK)
    torch.set_num_threads(args.threads)
    where = record.environment()
    modes = ["eager"] if args.quick else ["eager", "compiled"]
    results = [result for mode in modes for result in measure_all(args, mode)]
    sizes = {name: getattr(args, name) for name in ("hidden_size", "layers", "time", "batch")}
    run = {"benchmark": "memory", "config": sizes, "results": results}
    record.publish("memory", where, run, tabulate(results, args), args.out)
    return 0


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
    for residual in PUBLISHED[1:]:
        for m in [4] if residual == "ddl" else args.channels:
            for anchor_every in args.anchors:
                sizes = {"value_channels": m, "anchor_every": anchor_every}
                yield replace(backbone, residual=residual, **sizes)


def measure_all(args: argparse.Namespace, mode: str) -> list[dict[str, Any]]:
    batch = torch.randint(256, (args.batch, args.time), generator=torch.Generator().manual_seed(0))
    results: list[dict[str, Any]] = []
    for config in configurations(args):
        m = channels(config)
        progress(f"{mode} {config.residual} m={m} N={config.anchor_every or 1}")
        model = make(config)
        found = measure(model if mode == "eager" else compiled(model, "inductor"), batch)
        additive = results[0] if results else found._asdict()
        results.append({
            "mode": mode,
            "residual": config.residual,
            "value_channels": m,
            "anchor_every": config.anchor_every or 1,
            "saved": found.saved,
            "peak": found.peak,
            "saved_over_additive": found.saved / additive["saved"],
            "peak_over_additive": found.peak / additive["peak"],
            "formula": predicted(config, batch),
        })  # fmt: skip
    return results


def predicted(config: GPTConfig, batch: Tensor) -> int:
    """Return the bytes that an eager float32 model keeps, by formula."""
    run = TrainConfig(model=config, batch_size=len(batch), precision="float32")
    return kept(run, gpu=False).all


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
    own = itertools.chain(model.parameters(), model.buffers())
    loss, kept_bytes = kept_beside(own, lambda: model(batch, labels=batch).loss)
    loss.backward()
    return kept_bytes


def kept_beside(own: Iterable[Tensor], run: Callable[[], Any]) -> tuple[Any, int]:
    """Return what `run` returns, and the bytes of the distinct storages, beside those of `own`,
    that it saves for its backward."""
    known = {tensor.untyped_storage().data_ptr() for tensor in own}
    alive: dict[int, Tensor] = {}  # so that no address is used twice

    def pack(tensor: Tensor) -> Tensor:
        alive.setdefault(tensor.untyped_storage().data_ptr(), tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        result = run()
    saved = (t.untyped_storage().nbytes() for at, t in alive.items() if at not in known)
    return result, sum(saved)


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
        (
            "mode",
            "residual",
            "m",
            "N",
            "kept MB",
            "× additive",
            "formula",
            "peak MB",
            "× additive ",
        ),
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
    table.notes.append("formula: kept, over what scale/activations.py predicts for an eager model.")
    return table


if __name__ == "__main__":
    sys.exit(main())
