"""Training steps of every residual on the same backbone, against the additive one and plain PyTorch.

    python benchmarks/train_step.py            # the recorded configuration: many minutes
    python benchmarks/train_step.py --quick    # the same path in small: seconds, recorded nowhere

A step is zero_grad(set_to_none), forward with loss, backward; with --adamw the optimizer step too. All
models of one mode, eager or compiled, take turns in one process. Before anything is timed, logits, loss and
all gradients of every form of a variant must agree with plain PyTorch in eager mode, at the very
sizes that are timed; a variant that fails is reported red, without times, and the exit status is 1.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import plain
import record
from ddl.config import RESIDUALS, GPTConfig
from ddl.models import GPT
from measure import (
    RedGate,
    copies,
    gate,
    gb_per_second,
    interleave,
    ratio,
    ratio_interval,
)
from report import Table, progress

GOAL = {"ddl": 0.97, "ddl-cc": 0.90, "ddl-tc": 0.85}  # ratio to additive; -noec does less work
PAPER = {  # the paper's published code at the default configuration, measured on two cores
    "eager": {"ddl": 0.91, "ddl-cc": 0.48, "ddl-tc": 0.48},
    "compiled": {"ddl": 0.97, "ddl-cc": 0.58, "ddl-tc": 0.54},
}
# rms error of a tensor, relative to its scale. One operator is right to 5e-6 (80 units in the last
# place of float32, tests/tolerances.py); a trunk has 13 in sequence, and matrix products between.
TOLERANCE = 1e-4


@dataclass
class Contestant:
    """One model in one form and mode."""

    residual: str
    form: str  # "fused" or "plain"; the additive residual is plain
    mode: str  # "eager" or "compiled"
    model: nn.Module
    optimizer: torch.optim.Optimizer | None
    error: float | None = None  # largest in the gate
    red: str | None = None
    seconds: list[float] = field(default_factory=list)

    @property
    def name(self) -> str:
        return f"{self.residual} {self.form} {self.mode}"

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)


def main(arguments: Sequence[str] | None = None) -> int:
    args = parse(arguments)
    torch.set_num_threads(args.threads)
    where = record.environment()
    batch = torch.randint(256, (args.batch, args.time), generator=torch.Generator().manual_seed(0))
    contestants, copied = [], {}
    for mode in ("eager", "compiled"):
        if mode in args.modes:
            entered = enter(args, mode)
            check_all(entered, batch)
            copied[mode] = race(entered, batch, args, mode)
            contestants += entered
    table = tabulate(contestants, copied, args)
    table.show()
    print(record.describe(where))
    if args.out is not None:
        result = to_record(contestants, copied, args)
        summary = f"{table.markdown()}\n{record.describe(where)}\n"
        record.write("train_step", where | result, summary, args.out)
    return 1 if any(c.red for c in contestants) else 0


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    flag = argparse.BooleanOptionalAction
    parser.add_argument("--variants", nargs="+", choices=RESIDUALS, default=list(RESIDUALS))
    parser.add_argument("--rounds", type=int, help="steps of each that are timed (20, quick: 3)")
    parser.add_argument("--eager", action=flag, default=True, help="time eager models")
    parser.add_argument("--compile", action=flag, default=True, help="time compiled models")
    parser.add_argument("--peer", action=flag, default=True, help="time plain PyTorch as well")
    parser.add_argument("--adamw", action=flag, default=False, help="include an AdamW step")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--backend", default="inductor", help="of torch.compile")
    parser.add_argument("--hidden-size", type=int, help="384, quick: 64")
    parser.add_argument("--layers", type=int, help="6, quick: 2")
    parser.add_argument("--heads", type=int, help="6, quick: 2")
    parser.add_argument("--time", type=int, help="tokens per sequence: 256, quick: 32")
    parser.add_argument("--batch", type=int, help="sequences: 8, quick: 2")
    parser.add_argument("--quick", action="store_true", help="small sizes, few rounds")
    parser.add_argument("--out", type=Path, help="folder of the records (benchmarks/results)")
    args = parser.parse_args(arguments)
    small = {"hidden_size": 64, "layers": 2, "heads": 2, "time": 32, "batch": 2, "rounds": 3}
    full = {"hidden_size": 384, "layers": 6, "heads": 6, "time": 256, "batch": 8, "rounds": 20}
    for name, size in (small if args.quick else full).items():
        if getattr(args, name) is None:
            setattr(args, name, size)
        if getattr(args, name) < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1, got {size}")
    args.modes = ["eager"] * args.eager + ["compiled"] * args.compile
    if not args.modes:
        parser.error("one of --eager and --compile must be on")
    args.variants = [r for r in RESIDUALS if r == "additive" or r in args.variants]
    if args.out is None and not args.quick:
        args.out = record.RESULTS
    return args


# --- models ----------------------------------------------------------------------------------------


def enter(args: argparse.Namespace, mode: str) -> list[Contestant]:
    """The contestants of a mode; the forms of one variant share their parameters."""
    contestants = []
    for residual in args.variants:
        model = GPT(
            GPTConfig(
                residual=residual,
                vocab_size=256,
                block_size=args.time,
                num_layers=args.layers,
                num_heads=args.heads,
                hidden_size=args.hidden_size,
            )
        )
        perturb_(model)
        optimizer = torch.optim.AdamW(model.parameters(), fused=True) if args.adamw else None
        forms: dict[str, nn.Module] = {"plain": model}
        if residual != "additive":
            forms = {"fused": model, "plain": plain.peer(model)}
        for form, module in forms.items():
            if mode == "compiled":
                module = compiled(module, args.backend)
            contestants.append(Contestant(residual, form, mode, module, optimizer))
    if not args.peer:
        return [c for c in contestants if c.form == "fused" or c.residual == "additive"]
    return contestants


def compiled(model: nn.Module, backend: str) -> nn.Module:
    # All models run the same code objects, so the default limit of 8 versions each is too small.
    torch._dynamo.config.recompile_limit = 64
    return torch.compile(model, fullgraph=True, dynamic=False, backend=backend)


@torch.no_grad()
def perturb_(model: GPT) -> None:
    """Noise on what the trunk adds to the backbone: its zeros and ones would hide wrong terms."""
    generator = torch.Generator().manual_seed(1)
    for name, parameter in model.trunk.named_parameters():
        if not name.startswith("sublayers."):
            size = 0.5 / parameter.shape[-1] ** 0.5 if "residuals" in name else 0.1
            parameter += size * torch.randn(parameter.shape, generator=generator)


# --- correctness -----------------------------------------------------------------------------------


def check_all(contestants: list[Contestant], batch: Tensor) -> None:
    """Compare every contestant with its variant in plain, eager PyTorch; notes errors in place."""
    expected: dict[str, dict[str, Tensor]] = {}
    for contestant in contestants:
        progress(f"checking {contestant.name}")
        residual, model = contestant.residual, contestant.model
        if residual not in expected:
            model_of = getattr(model, "_orig_mod", model)  # what torch.compile wraps
            oracle = model_of if residual == "additive" else plain.peer(model_of)
            expected = {residual: results(oracle, batch)}  # contestants come variant by variant
        try:
            contestant.error = check(results(model, batch), expected[residual])
        except RedGate as difference:
            contestant.red = str(difference)


def results(model: nn.Module, batch: Tensor) -> dict[str, Tensor]:
    """Logits, loss and the gradient of every parameter, by name."""
    model.zero_grad(set_to_none=True)
    logits, loss = model(batch, labels=batch)
    loss.backward()
    named = {name.removeprefix("_orig_mod."): p.grad for name, p in model.named_parameters()}
    model.zero_grad(set_to_none=True)
    assert all(grad is not None for grad in named.values()), "a parameter has no gradient"
    return {"logits": logits.detach(), "loss": loss.detach()} | named


def check(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """The largest error of `gate`; a bias is measured against the weight beside it as well."""
    if actual.keys() != expected.keys():
        raise RedGate(f"parameters {sorted(actual.keys() ^ expected.keys())} are on one side only")
    scales = {n: n.removesuffix("bias") + "weight" for n in expected if n.endswith(".bias")}
    pairs = {name: (actual[name], expected[name]) for name in expected}
    return gate(pairs, TOLERANCE, scales)


# --- timing ----------------------------------------------------------------------------------------


def race(
    contestants: list[Contestant], batch: Tensor, args: argparse.Namespace, mode: str
) -> dict[str, Any]:
    """Time the contestants whose gate is green, and copies of a state of m = 4 among them."""

    def timed(contestant: Contestant) -> tuple[float, ...]:
        started = time.perf_counter()
        step(contestant, batch)
        return (time.perf_counter() - started,)

    state = torch.ones(args.batch, args.time, args.hidden_size, 4)
    steps = {c.name: lambda c=c: timed(c) for c in contestants if c.red is None}
    times = interleave(steps | copies(state), args.rounds, what=mode)
    for contestant in contestants:
        contestant.seconds = [taken for (taken,) in times.get(contestant.name, [])]
        contestant.model.zero_grad(set_to_none=True)
    moved = 2 * state.nbytes
    rates = {n: gb_per_second(moved, [taken for (taken,) in times[n]]) for n in ("copy", "clone")}
    return {"bytes": moved, **{f"{name}_gb_s": rate for name, rate in rates.items()}}


def step(contestant: Contestant, batch: Tensor) -> None:
    """What is timed."""
    contestant.model.zero_grad(set_to_none=True)
    contestant.model(batch, labels=batch).loss.backward()
    if contestant.optimizer is not None:
        contestant.optimizer.step()


def boundary_elements(residual: str) -> int:
    """Elements per token and feature that one boundary must move, forward and backward.

    A boundary rewrites X by the last sublayer's k and reads h for the next: forward X, k, X', h,
    backward G, X, k, dh, dX, dk; a token read also stores and loads x. Additive: an addition and a
    norm, each tensor moved once.
    """
    if residual == "additive":
        return 4 + 4
    m = 1 if residual == "ddl" else 4
    token = 2 if residual.startswith("ddl-tc") else 0
    return (2 * m + 2) + (3 * m + 3) + token


def floor(residual: str, args: argparse.Namespace, additive: float, gb_s: float) -> float:
    """The ratio to expect if all boundaries move their bytes at the bandwidth of a copy.

    The additive step keeps its measured time; only the bytes that it moves less count. The opening read
    and the expansion together move what one boundary moves, hence one more than sublayers.
    """
    features = (2 * args.layers + 1) * args.batch * args.time * args.hidden_size
    more = boundary_elements(residual) - boundary_elements("additive")
    return additive / (additive + more * features * 4 / (gb_s * 1e9))


# --- results ---------------------------------------------------------------------------------------


def summarise(
    contestant: Contestant, contestants: list[Contestant], copied: dict[str, Any], args: Any
) -> dict[str, Any]:
    """Everything that is reported of one contestant, as JSON types."""
    c = contestant
    family = c.residual.removesuffix("-noec")
    summary: dict[str, Any] = {
        "residual": c.residual,
        "form": c.form,
        "mode": c.mode,
        "gate": {"red": c.red, "worst": c.error, "tolerance": TOLERANCE},
        "goal": GOAL.get(family) if c.form == "fused" else None,
        "paper": PAPER[c.mode].get(c.residual) if c.form == "fused" else None,
    }
    if c.red is not None:
        return summary
    quartiles = torch.tensor(c.seconds, dtype=torch.float64).quantile(torch.tensor([0.25, 0.75]).double())
    summary |= {"median": c.median, "quartiles": quartiles.tolist(), "seconds": c.seconds}
    base = find(contestants, "additive", "plain", c.mode)
    if base is not None:
        summary["ratio"] = ratio(base.seconds, c.seconds)
        summary["interval"] = ratio_interval(base.seconds, c.seconds)
        summary["floor"] = floor(c.residual, args, base.median, copied[c.mode]["copy_gb_s"])
    other = find(contestants, c.residual, "plain", c.mode)
    if c.form == "fused" and other is not None:
        summary["faster_than_plain"] = ratio(other.seconds, c.seconds)
    return summary


def find(contestants: list[Contestant], *key: str) -> Contestant | None:
    """The contestant (residual, form, mode), if it was timed."""
    for c in contestants:
        if (c.residual, c.form, c.mode) == key and c.red is None:
            return c
    return None


def tabulate(
    contestants: list[Contestant], copied: dict[str, Any], args: argparse.Namespace
) -> Table:
    what = "forward + backward" + (" + AdamW (fused)" if args.adamw else "")
    table = Table(
        f"Training step, {what}: d {args.hidden_size}, {args.layers} layers, {args.heads} heads, "
        f"T {args.time}, B {args.batch}, float32, {args.threads} threads",
        ("mode", "residual", "form", "ms", "quartiles", "ratio", "95 %", "goal", "floor", "paper",
         "vs plain"),
        labels=3,
    )  # fmt: skip
    for c in contestants:
        s = summarise(c, contestants, copied, args)
        cells = ["RED", "", "", ""] if c.red else timing_cells(s)
        known = [f"{s[k]:.2f}" if s[k] is not None else "" for k in ("goal", "paper")]
        bound = f"{s['floor']:.3f}" if "floor" in s and c.residual != "additive" else ""
        faster = f"{s['faster_than_plain']:.2f}×" if "faster_than_plain" in s else ""
        table.add(c.mode, c.residual, c.form, *cells, known[0], bound, known[1], faster)
        if c.red:
            table.notes.append(f"RED, not timed: {c.name}: {c.red}")
    errors = [c.error for c in contestants if c.error is not None]
    table.notes += [
        f"ratio: median(additive) / median, {args.rounds} interleaved rounds; 95 %: resampled rounds; "
        "floor: the ratio if every boundary moved its bytes at copy speed; paper: its published code, "
        "measured at d 384, 6 layers; zero_grad(set_to_none) is part of a step.",
        *(f"{mode}: copy {c['copy_gb_s']:.1f} GB/s, clone {c['clone_gb_s']:.1f} GB/s (read + written)"
          for mode, c in copied.items()),
        f"gate: largest rms error {max(errors, default=float('nan')):.1e}, allowed {TOLERANCE:.0e}",
    ]  # fmt: skip
    return table


def timing_cells(s: dict[str, Any]) -> list[str]:
    """Milliseconds, quartiles, ratio with a mark where it reaches its goal, interval."""
    low, high = s["quartiles"]
    cells = [f"{1e3 * s['median']:.1f}", f"{1e3 * low:.0f}–{1e3 * high:.0f}"]
    if "ratio" not in s:
        return [*cells, "", ""]
    mark = "" if s["goal"] is None else " ✓" if s["ratio"] >= s["goal"] else " ✗"
    return [*cells, f"{s['ratio']:.3f}{mark}", "{:.3f}–{:.3f}".format(*s["interval"])]


def to_record(
    contestants: list[Contestant], copied: dict[str, Any], args: argparse.Namespace
) -> dict[str, Any]:
    sizes = ("hidden_size", "layers", "heads", "time", "batch", "rounds", "backend", "quick")
    return {
        "benchmark": "train_step",
        "config": {name: getattr(args, name) for name in sizes} | {"dtype": "float32"},
        "step": ["zero_grad", "forward", "backward"] + ["adamw"] * args.adamw,
        "copies": copied,
        "results": [summarise(c, contestants, copied, args) for c in contestants],
    }


if __name__ == "__main__":
    sys.exit(main())
