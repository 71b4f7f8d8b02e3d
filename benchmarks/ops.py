"""GB/s of every operator, forward and backward, against a copy measured in the same rounds.

    python benchmarks/ops.py            # all sizes: minutes
    python benchmarks/ops.py --quick    # the same path in small: seconds, recorded nowhere

Bytes are those of the tensors that must move, taken from the tensors: forward X, k → X', h;
backward G, X, k, dh → dX, dk; a token read also stores and loads x. Values, gates, statistics and
parameters are left out, and so is what an implementation moves beyond that: it shows as a lower
rate. Every call allocates its outputs, as in training. Each case first has to agree with
`ddl.reference` in its outputs and gradients; one that does not is reported red, without times, and
the exit status is 1.
"""

from __future__ import annotations

import argparse
import itertools
import math
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import record
from ddl import functional, reference
from measure import RedGateError, Timed, copies, gate, gb_per_second, interleave
from report import Table

OPS = ("rewrite", "read", "rewrite_read", "expand")
GOAL = 0.85  # of the copy's rate
TAPS = 4
LONGEST = 256  # tokens in a sequence
# rms error relative to the scale of a tensor. The operators are right to 5e-6, 80 units in the last
# place of float32 (tests/tolerances.py); here both sides sum parameter gradients over 2^14 tokens.
TOLERANCE = 2e-5


@dataclass(frozen=True)
class Case:
    """One operator at one size."""

    op: str
    form: str  # of the read: identity, channel, token; of the expansion: repeat, conv; else ""
    d: int
    m: int
    batch: int
    time: int

    @property
    def name(self) -> str:
        return f"{self.op} {self.form} d={self.d} m={self.m}".replace("  ", " ")


@dataclass
class Problem:
    """A case's arguments, and which of its tensors have to move."""

    inputs: dict[str, Tensor]  # tensors, all with gradients
    numbers: dict[str, Any]
    forward_bytes: int
    backward_bytes: int
    state: Tensor  # what copies are measured on

    def outputs(self, op: Any) -> list[Tensor]:
        result = op(**self.inputs, **self.numbers)
        tensors = result if isinstance(result, tuple) else (result,)
        return [tensor for tensor in tensors if tensor is not None]


def main(arguments: Sequence[str] | None = None) -> int:
    args = parse(arguments)
    torch.set_num_threads(args.threads)
    where = record.environment()
    results = [measure(case, args.rounds) for case in cases(args)]
    table = tabulate(results, args)
    table.show()
    print(record.describe(where))
    if args.out is not None:
        config = {name: getattr(args, name) for name in ("megabytes", "rounds", "quick")}
        run = {"benchmark": "ops", "config": config | {"dtype": "float32"}, "results": results}
        summary = f"{table.markdown()}\n{record.describe(where)}\n"
        record.write("ops", where | run, summary, args.out)
    return 1 if any(result["gate"]["red"] for result in results) else 0


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ops", nargs="+", choices=OPS, default=list(OPS))
    parser.add_argument("--sizes", nargs="+", type=int, help="values of d")
    parser.add_argument("--channels", nargs="+", type=int, default=[1, 4, 16], help="values of m")
    parser.add_argument("--megabytes", type=float, help="of a state (25, quick: 0.1)")
    parser.add_argument("--rounds", type=int, help="calls of each that are timed (15, quick: 3)")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--quick", action="store_true", help="small states, few rounds")
    parser.add_argument("--out", type=Path, help="folder of the records (benchmarks/results)")
    args = parser.parse_args(arguments)
    small = {"sizes": [96], "megabytes": 0.1, "rounds": 3}
    full = {"sizes": [384, 768, 1024, 2048, 4096], "megabytes": 25.0, "rounds": 15}
    for name, value in (small if args.quick else full).items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    if min(*args.sizes, *args.channels, args.rounds, args.megabytes, args.threads) <= 0:
        parser.error("sizes, channels, megabytes, rounds and threads must be positive")
    if args.out is None and not args.quick:
        args.out = record.RESULTS
    return args


def cases(args: argparse.Namespace) -> Iterator[Case]:
    """All cases, with as many tokens as give a state of about the wanted size."""
    for op, m, d in itertools.product(args.ops, args.channels, args.sizes):
        tokens = max(TAPS, round(args.megabytes * 1e6 / (4 * d * m)))
        batch = math.ceil(tokens / LONGEST)
        forms: tuple[str, ...] = ("",)
        if op in ("read", "rewrite_read"):
            forms = ("identity" if m == 1 else "channel", "token")
        elif op == "expand":
            forms = ("conv",) if m == 1 else ("repeat", "conv")
        for form in forms:
            yield Case(op, form, d, m, batch, tokens // batch)


def build(case: Case) -> Problem:
    """Random arguments of the sizes they have in a model, and the bytes of one call."""
    generator = torch.Generator().manual_seed(0)
    d, m, batch = case.d, case.m, (case.batch, case.time)

    def normal(*shape: int, scale: float = 1.0) -> Tensor:
        return (scale * torch.randn(shape, generator=generator)).requires_grad_()

    if case.op == "expand":
        inputs = {"x": normal(*batch, d)}
        if case.form == "conv":
            inputs["weight"] = normal(d, m, TAPS, scale=0.5)
        row, state = inputs["x"].nbytes, torch.randn(*batch, d, m, generator=generator)
        again = row if case.form == "conv" else 0  # x, for the weight's gradient
        forward, backward = row + state.nbytes, state.nbytes + row + again  # x, X; G, dx
        return Problem(inputs, {"value_channels": m}, forward, backward, state)

    inputs, numbers = {"state": normal(*batch, d, m)}, {}
    whole, row = inputs["state"].nbytes, inputs["state"].nbytes // m  # bytes of X; of k, h or x
    forward, backward = whole, 2 * whole  # X; X and dX
    if case.op != "read":
        inputs |= {"direction": normal(*batch, d), "value": normal(*batch, m)}
        inputs["gate"] = (2 * torch.rand(batch, generator=generator)).requires_grad_()
        numbers["eps_k"] = 0.02 * math.sqrt(d)
        forward, backward = forward + row + whole, backward + whole + 2 * row  # k, X'; G, k, dk
    if case.op != "rewrite":
        inputs |= read_parameters(case, normal)
        token = row if case.form == "token" else 0
        forward, backward = forward + row + token, backward + row + token  # h, x; dh, x
    return Problem(inputs, numbers, forward, backward, inputs["state"])


def read_parameters(case: Case, normal: Any) -> dict[str, Tensor]:
    """Parameters of a read with a gate and a linear value, as between two sublayers."""
    d, m = case.d, case.m
    parameters = {
        "norm_weight": normal(d),
        "gate_weight": normal(d, scale=d**-0.5),
        "gate_bias": normal(),
        "value_weight": normal(m, d, scale=d**-0.5),
        "value_bias": normal(m),
    }
    if case.form != "identity":
        taps = (TAPS,) if case.form == "token" else ()
        parameters["compress"] = normal(d, m, *taps, scale=1 / m)
    return parameters


def check(case: Case, problem: Problem) -> float:
    """Outputs and all gradients against the reference: the largest error, or RedGateError."""
    leaves = list(problem.inputs.values())
    sides = []
    for module in (functional, reference):
        outputs = problem.outputs(getattr(module, case.op))
        grads = torch.autograd.grad(outputs, leaves, cotangents(outputs))
        named = {f"output {i}": output.detach() for i, output in enumerate(outputs)}
        sides.append(named | dict(zip(problem.inputs, grads, strict=True)))
    pairs = {name: (sides[0][name], sides[1][name]) for name in sides[1]}
    scales = {"gate_bias": "gate_weight", "value_bias": "value_weight"}
    return gate(pairs, TOLERANCE, scales if "gate_bias" in pairs else {})


def cotangents(outputs: list[Tensor]) -> list[Tensor]:
    """Fixed random gradients of the outputs."""
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(output.shape, generator=generator) for output in outputs]


def stopwatch(case: Case, problem: Problem) -> Timed:
    """Seconds of one forward call, recorded by autograd, and of its backward."""
    op, leaves = getattr(functional, case.op), list(problem.inputs.values())
    incoming = cotangents(problem.outputs(op))

    def run() -> tuple[float, ...]:
        started = time.perf_counter()
        outputs = problem.outputs(op)
        between = time.perf_counter()
        grads = torch.autograd.grad(outputs, leaves, incoming)
        ended = time.perf_counter()
        del outputs, grads  # not before the clock stopped
        return between - started, ended - between

    return run


def measure(case: Case, rounds: int) -> dict[str, Any]:
    """Everything that is reported of one case, as JSON types."""
    problem = build(case)
    result: dict[str, Any] = {
        **{name: getattr(case, name) for name in ("op", "form", "d", "m", "batch", "time")},
        "state_bytes": problem.state.nbytes,
        "gate": {"red": None, "worst": None, "tolerance": TOLERANCE},
    }
    try:
        result["gate"]["worst"] = check(case, problem)
    except RedGateError as difference:
        result["gate"]["red"] = str(difference)
        return result
    steps = {"op": stopwatch(case, problem)} | copies(problem.state)
    seconds = interleave(steps, rounds, what=case.name)
    forward, backward = (list(column) for column in zip(*seconds["op"], strict=True))
    for name, moved, taken in [
        ("forward", problem.forward_bytes, forward),
        ("backward", problem.backward_bytes, backward),
        *(
            (name, 2 * problem.state.nbytes, [took for (took,) in seconds[name]])
            for name in ("copy", "clone")
        ),
    ]:
        rate = gb_per_second(moved, taken)
        median = statistics.median(taken)
        result[name] = {"bytes": moved, "gb_s": rate, "median": median, "seconds": taken}
    return result


def tabulate(results: list[dict[str, Any]], args: argparse.Namespace) -> Table:
    table = Table(
        f"Operators: float32, states of {args.megabytes:g} MB, {args.threads} threads; "
        "GB/s, and percent of the copy",
        ("operator", "form", "d", "m", "tokens", "forward", "% copy", "% clone", "backward",
         "% copy", "% clone", "copy", "clone"),
        labels=2,
    )  # fmt: skip
    shares = []
    for r in results:
        cells = [r["op"], r["form"], f"{r['d']}", f"{r['m']}", f"{r['batch'] * r['time']}"]
        if r["gate"]["red"]:
            table.add(*cells, "RED", *[""] * 7)
            table.notes.append(f"RED, not timed: {r['op']} {r['form']}: {r['gate']['red']}")
            continue
        copy, clone = r["copy"]["gb_s"], r["clone"]["gb_s"]
        for half in ("forward", "backward"):
            rate = r[half]["gb_s"]
            shares.append(rate / copy)
            cells += [f"{rate:.1f}", f"{rate / copy:.0%}", f"{rate / clone:.0%}"]
        table.add(*cells, f"{copy:.1f}", f"{clone:.1f}")
    if shares:
        reached = sum(share >= GOAL for share in shares)
        table.notes.append(
            f"{reached} of {len(shares)} reach {GOAL:.0%} of copy; lowest {min(shares):.0%}, "
            f"median {statistics.median(shares):.0%}. copy: copy_ between two tensors; clone: into "
            "fresh memory, as the operators write. All rates count bytes read and written, at the "
            f"median of {args.rounds} interleaved rounds."
        )
    return table


if __name__ == "__main__":
    sys.exit(main())
