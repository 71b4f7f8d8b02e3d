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

import torch
import torch.nn.functional as F
from torch import Tensor

from common import record
from common.measure import Timed, interleave, ratio, ratio_interval
from common.report import Table
from ddl import DeltaResidual, functional

LAYERS = 12  # boundaries of the reference model


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
    steps = {name: stopwatch(make(*shape)) for name, make in BOUNDARIES.items()}
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


RewriteRead = Callable[[], Sequence[Tensor]]


def tensors(batch: int, time_: int, d: int) -> dict[str, Tensor]:
    torch.manual_seed(0)
    lead = (batch, time_)
    made = {
        "state": torch.randn(*lead, d, 4),
        "direction": torch.randn(*lead, d),
        "value": torch.randn(*lead, 4),
        "gate": torch.rand(*lead),
        "compress": torch.full((d, 4), 0.25),
        "norm": torch.ones(d),
    }
    return {name: tensor.requires_grad_() for name, tensor in made.items()}


def fused(batch: int, time_: int, d: int) -> RewriteRead:
    t, residual = tensors(batch, time_, d), DeltaResidual(d, 4)

    def run() -> Sequence[Tensor]:
        return functional.rewrite_read(
            t["state"], t["direction"], t["value"], t["gate"], eps_k=0.4,
            compress=t["compress"], norm_weight=t["norm"], **residual.read_arguments(),
        )  # fmt: skip

    return run


def outside(batch: int, time_: int, d: int) -> RewriteRead:
    t, residual = tensors(batch, time_, d), DeltaResidual(d, 4)

    def run() -> Sequence[Tensor]:
        state, x, *_ = functional.rewrite_read(
            t["state"], t["direction"], t["value"], t["gate"], eps_k=0.4,
            compress=t["compress"], norm_eps=None,
        )  # fmt: skip
        h = F.layer_norm(x, (d,), t["norm"])
        value, gate = residual.value_and_gate(state, h, x)
        assert value is not None
        return state, h, value, gate

    return run


def additive(batch: int, time_: int, d: int) -> RewriteRead:
    t = tensors(batch, time_, d)
    x = torch.randn(batch, time_, d, requires_grad=True)

    def run() -> Sequence[Tensor]:
        y = x + t["direction"]
        return y, F.layer_norm(y, (d,), t["norm"])

    return run


BOUNDARIES = {"fused RMS read": fused, "LayerNorm outside": outside, "additive": additive}


def stopwatch(boundary: RewriteRead) -> Timed:
    grads = [torch.ones_like(x) for x in boundary()]

    def run() -> tuple[float, ...]:
        started = time.perf_counter()
        for _ in range(LAYERS):
            torch.autograd.backward(list(boundary()), grads)
        return ((time.perf_counter() - started) / LAYERS,)

    return run


if __name__ == "__main__":
    sys.exit(main())
