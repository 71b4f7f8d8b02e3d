"""The delta rule over time on one core, against the fallback that transformers has for CPUs.

    python benchmarks/delta_rule.py            # minutes
    python benchmarks/delta_rule.py --quick    # the same path in small: seconds, recorded nowhere

Per head: torch_chunk_gated_delta_rule of Qwen3-Next; per feature: chunk_kimi_delta_attention of
Kimi Linear; a decode step: their recurrent forms. Both run in float32, interleaved, and processor
time counts. First outputs and gradients must agree with `ddl.reference` in float64 and with the
fallback. A case that does not is reported red, without times, and the exit status is 1.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from common import record
from common.arguments import make_parser, parse
from ddl import functional, reference
from ddl.lab.bench.measure import MismatchError, Timed, compare, interleave, ratio, ratio_interval
from ddl.lab.bench.tables import Table
from memory import kept_beside

FULL = {"sizes": [64, 128], "times": [512, 4096], "heads": 8, "rounds": 5, "threads": 1}
QUICK = FULL | {"sizes": [16], "times": [70], "heads": 2, "rounds": 2}
# The least ratios of times, by size; None: any size. Memory: the largest share.
GOALS = {
    ("forward", 64): 10.0, ("forward", 128): 4.5, ("both", 64): 7.0, ("both", 128): 3.0,
    ("step", None): 5.0,
}  # fmt: skip
MEMORY_GOAL = 0.25
CHECKED = 512  # tokens that are compared with the loop of the reference
Outputs = tuple[Tensor, Tensor]


def main(arguments: Sequence[str] | None = None) -> int:
    args = parse(make_parser(__doc__), arguments, full=FULL, quick=QUICK)
    torch.set_num_threads(args.threads)
    where = record.environment()
    cases = itertools.product(("head", "feature"), args.times, args.sizes)
    results = [measure(*case, args) for case in cases]
    config = {name: getattr(args, name) for name in ("heads", "rounds", "quick")}
    run = {"benchmark": "delta_rule", "config": config | {"dtype": "float32"}, "results": results}
    record.publish("delta_rule", where, run, tabulate(results, args), args.out)
    return 1 if any(result["red"] for result in results) else 0


def inputs(decay: str, T: int, size: int, heads: int) -> dict[str, Tensor]:
    """Unit queries and keys, β in [0, 1], decays between exp(−0.1) and 1."""
    r = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, T, heads, size, generator=r) for _ in range(3))
    decays = (1, T, heads, size) if decay == "feature" else (1, T, heads)
    return {
        "q": F.normalize(q, dim=-1),
        "k": F.normalize(k, dim=-1),
        "v": v,
        "beta": torch.rand(1, T, heads, generator=r),
        "g": -0.1 * torch.rand(*decays, generator=r),
    }


def fallback(decay: str, part: str) -> Callable[..., Outputs]:
    """The function of transformers, with our names."""
    from transformers.models.kimi_linear import modeling_kimi_linear as kimi
    from transformers.models.qwen3_next import modeling_qwen3_next as qwen

    functions: dict[tuple[str, bool], Callable[..., Outputs]] = {
        ("head", False): qwen.torch_chunk_gated_delta_rule,
        ("head", True): qwen.torch_recurrent_gated_delta_rule,
        ("feature", False): kimi.chunk_kimi_delta_attention,
        ("feature", True): kimi.recurrent_kimi_delta_attention,
    }
    function = functions[decay, part == "step"]

    def call(q: Tensor, k: Tensor, v: Tensor, beta: Tensor, g: Tensor, **options: Any) -> Outputs:
        return function(q, k, v, g=g, beta=beta, output_final_state=True, **options)

    return call


def recorded(call: Callable[..., Outputs], given: dict[str, Tensor]) -> dict[str, Tensor]:
    """Outputs and gradients by name, for random gradients of the outputs."""
    leaves = {name: x.detach().requires_grad_() for name, x in given.items()}
    y, state = call(**leaves)
    r = torch.Generator().manual_seed(1)
    cotangents = [torch.randn(x.shape, generator=r).to(x.dtype) for x in (y, state)]
    grads = torch.autograd.grad((y, state), list(leaves.values()), cotangents)
    return {"y": y, "final_state": state} | {
        f"gradient of {name}": grad for name, grad in zip(leaves, grads, strict=True)
    }


def check(decay: str, given: dict[str, Tensor]) -> float:
    """Compare with the reference on the first tokens, and with the fallback on all."""
    first = {name: x[:, :CHECKED] for name, x in given.items()}
    exact = recorded(reference.delta_rule, {name: x.double() for name, x in first.items()})
    ours = recorded(functional.delta_rule, first)
    error = compare({name: (ours[name], exact[name]) for name in exact}, 1e-5)
    theirs, ours = (
        recorded(call, given) for call in (fallback(decay, "both"), functional.delta_rule)
    )
    compare({name: (ours[name], theirs[name]) for name in theirs}, 1e-3)
    return error


def kept(call: Callable[..., Outputs], given: dict[str, Tensor]) -> int:
    """Bytes that a call saves for its backward beside its inputs."""
    leaves = {name: x.detach().requires_grad_() for name, x in given.items()}
    return kept_beside(leaves.values(), lambda: call(**leaves))[1]


def timed(call: Callable[..., Outputs], part: str, given: dict[str, Tensor]) -> Timed:
    """A measurement of processor time: of a forward, of one with its backward, or of a step."""

    def once() -> None:
        if part == "both":
            leaves = {name: x.detach().requires_grad_() for name, x in given.items()}
            y, state = call(**leaves)
            torch.autograd.backward((y, state), (torch.ones_like(y), torch.ones_like(state)))
            return
        with torch.no_grad():
            call(**given)

    repeats = 50 if part == "step" else 1

    def run() -> tuple[float]:
        start = time.process_time()
        for _ in range(repeats):
            once()
        return ((time.process_time() - start) / repeats,)

    return run


def measure(decay: str, T: int, size: int, args: argparse.Namespace) -> dict[str, Any]:
    """The results of one case as JSON types."""
    given = inputs(decay, T, size, args.heads)
    result: dict[str, Any] = {"decay": decay, "time": T, "size": size, "red": None}
    try:
        result["error"] = check(decay, given)
    except MismatchError as difference:
        return result | {"red": str(difference)}
    step = {name: x[:, :1] for name, x in given.items()}
    step["initial_state"] = torch.randn(1, args.heads, size, size)
    for part in ("forward", "both", "step"):
        arguments = step if part == "step" else given
        steps = {
            "ddl": timed(functional.delta_rule, part, arguments),
            "transformers": timed(fallback(decay, part), part, arguments),
        }
        what = f"decay per {decay}, {T} tokens, size {size}, {part}"
        seconds = interleave(steps, args.rounds, warmup=1, what=what)
        ours, theirs = ([row[0] for row in seconds[name]] for name in ("ddl", "transformers"))
        result[part] = {
            "ddl_seconds": ours,
            "transformers_seconds": theirs,
            "ratio": ratio(theirs, ours),
            "interval": ratio_interval(theirs, ours),
        }
    result["kept_bytes"] = kept(functional.delta_rule, given)
    result["transformers_kept_bytes"] = kept(fallback(decay, "both"), given)
    return result


def tabulate(results: list[dict[str, Any]], args: argparse.Namespace) -> Table:
    table = Table(
        f"The delta rule over time: {args.heads} heads, float32, {args.threads} thread(s); "
        "processor time of transformers' fallback over ours",
        ("decay per", "tokens", "size", "forward", "ms", "with backward", "ms", "step", "µs",
         "kept, MB", "of theirs"),
    )  # fmt: skip
    for r in results:
        cells = [r["decay"], f"{r['time']}", f"{r['size']}"]
        if r["red"]:
            table.add(*cells, "RED", *[""] * 7)
            table.notes.append(f"RED, not timed: decay per {r['decay']}: {r['red']}")
            continue
        for part, unit in (("forward", 1e3), ("both", 1e3), ("step", 1e6)):
            goal = GOALS.get((part, r["size"]), GOALS.get((part, None)))
            found = r[part]
            mark = "" if goal is None or args.quick else " ✓" if found["ratio"] >= goal else " ✗"
            cells.append(f"{found['ratio']:.1f}×{mark}")
            cells.append(f"{unit * statistics.median(found['ddl_seconds']):.2f}")
        share = r["kept_bytes"] / r["transformers_kept_bytes"]
        mark = "" if args.quick else " ✓" if share <= MEMORY_GOAL else " ✗"
        table.add(*cells, f"{r['kept_bytes'] / 1e6:.1f}", f"{share:.2f}{mark}")
    table.notes.append(
        f"Ratios of medians over {args.rounds} interleaved rounds; ms and µs are ours. Goals: "
        "forward 10× at 64 and 4.5× at 128, with backward 7× and 3×, a step 5×, a quarter of what "
        "the fallback keeps for its backward beside the inputs."
    )
    return table


if __name__ == "__main__":
    sys.exit(main())
