"""The cost of a LayerNorm outside the fused read, as in a converted nanoGPT, which keeps its norms.

    python benchmarks/layer_norm.py            # a minute
    python benchmarks/layer_norm.py --quick

It times a boundary between two sublayers, forward and backward, at the sizes of the reference
configuration: (a) one fused operator that rewrites, reads, normalises (RMS) and returns gate and
value; (b) the same operator without the norm, then a LayerNorm, then one matrix product for gate
and value, as `ddl.nanogpt` does; (c) the additive residual with a LayerNorm. The three are
interleaved in one process.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from common import record
from ddl.lab.bench import boundaries
from ddl.lab.bench.measure import Timed, interleave, ratio, ratio_interval
from ddl.lab.bench.tables import Table

LAYERS = 12  # boundaries of the reference model
M = 4


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--quick", action="store_true", help="small tensors")
    args = parser.parse_args(arguments)
    torch.set_num_threads(args.threads)
    where = record.environment()
    shape = (1, 8, 32) if args.quick else (8, 256, 384)
    table = Table(
        f"A boundary, forward and backward: B, T, d = {shape}, m 4, {args.threads} threads",
        ("boundary", "ms", "× fused", "95 %"),
    )
    steps = {name: stopwatch(step) for name, step in make(*shape).items()}
    seconds = {k: [t for (t,) in v] for k, v in interleave(steps, args.rounds).items()}
    fused = seconds["fused RMS read"]
    for name, taken in seconds.items():
        low, high = ratio_interval(taken, fused)
        median = sorted(taken)[len(taken) // 2]
        table.add(
            name, f"{1e3 * median:.2f}", f"{ratio(taken, fused):.2f}", f"{low:.2f}–{high:.2f}"
        )
    table.show()
    print(record.describe(where))
    return 0


Boundary = Callable[[], Sequence[Tensor]]


def make(batch: int, time_: int, d: int) -> dict[str, Boundary]:
    """The boundaries on random tensors, by name."""
    shape = (batch, time_, d)
    fused, outside = boundaries.FusedRead(d, M), boundaries.LayerNormOutside(d, M)
    additive = boundaries.Additive(d, "layer")
    return {
        "fused RMS read": partial(fused, **boundaries.inputs(*shape, M)),
        "LayerNorm outside": partial(outside, **boundaries.inputs(*shape, M)),
        "additive": partial(additive, **boundaries.additive_inputs(*shape)),
    }


def stopwatch(boundary: Boundary) -> Timed:
    grads = [torch.ones_like(x) for x in boundary()]

    def run() -> tuple[float, ...]:
        started = time.perf_counter()
        for _ in range(LAYERS):
            torch.autograd.backward(list(boundary()), grads)
        return ((time.perf_counter() - started) / LAYERS,)

    return run


if __name__ == "__main__":
    sys.exit(main())
