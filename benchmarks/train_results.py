"""The report of the training-step benchmark: ratios, floors, the table and the record."""

from __future__ import annotations

import argparse
from typing import Any

from common.candidates import Candidate, quartiles
from common.floor import boundary_features, floor
from ddl.lab import machine
from ddl.lab.bench.agreement import TOLERANCE
from ddl.lab.bench.measure import ratio, ratio_interval
from ddl.lab.bench.tables import Table

# Least ratio to additive of m = 1, CC and TC; -noec does less work, so the same goal holds. By
# precision, mode, whether every state is stored, and whether the states are in bfloat16.
GOALS = {
    ("float32", "eager", True, False): (1.00, 0.95, 0.94),
    ("float32", "compiled", True, False): (0.985, 0.95, 0.94),
    ("float32", "compiled", False, False): (0.985, 0.94, 0.93),
    ("autocast", "compiled", True, False): (0.98, 0.91, 0.90),
    ("autocast", "compiled", True, True): (0.99, 0.94, 0.93),
}
RESIDUALS = {"ddl": 0, "ddl-cc": 1, "ddl-tc": 2}
PAPER = {  # the paper's published code, measured on two cores
    "eager": {"ddl": 0.91, "ddl-cc": 0.48, "ddl-tc": 0.48},
    "compiled": {"ddl": 0.97, "ddl-cc": 0.58, "ddl-tc": 0.54},
}
STEP = ["zero_grad", "forward", "backward"]
COLUMNS = (
    "mode", "residual", "form",
    "ms", "quartiles", "ratio", "95 %", "goal", "floor", "paper", "vs plain",
)  # fmt: skip


def summarise(
    c: Candidate, others: list[Candidate], copied: dict[str, Any], args: argparse.Namespace
) -> dict[str, Any]:
    """The results of one candidate as JSON types."""
    # Goals and the paper's numbers mean something at their own configuration only.
    ours = c.form == "fused" and args.reference and c.residual != "additive"
    summary: dict[str, Any] = {
        "residual": c.residual,
        "form": c.form,
        "mode": c.mode,
        "heat": c.group,  # earlier records have this key
        "gate": {"red": c.red, "worst": c.error, "drift": c.drift, "tolerance": TOLERANCE},
        "goal": goal(c, args) if ours else None,
        "paper": PAPER[c.mode].get(c.residual) if ours and not c.autocast else None,
    }
    if c.compile_seconds is not None:
        summary["compile_seconds"] = c.compile_seconds
    if c.red is not None:
        return summary
    summary |= {"median": c.median, "quartiles": quartiles(c.seconds), "seconds": c.seconds}
    base = find(others, "additive", "plain", c.mode, c.group)
    if base is not None:
        summary["ratio"] = ratio(base.seconds, c.seconds)
        summary["interval"] = ratio_interval(base.seconds, c.seconds)
        boundaries = boundary_features(args.layers, args.batch * args.time, args.hidden_size)
        rate = copied[c.mode]["copy_gb_s"]
        summary["floor"] = floor(c.residual, boundaries, base.median, rate, **sizes(args))
    peer = find(others, c.residual, "plain", c.mode, "plain")
    peers_base = find(others, "additive", "plain", c.mode, "plain")
    if c.form == "fused" and peer is not None and base is not None and peers_base is not None:
        plain = ratio(peers_base.seconds, peer.seconds)
        summary["faster_than_plain"] = summary["ratio"] / plain
    return summary


def goal(c: Candidate, args: argparse.Namespace) -> float | None:
    stores_all, narrow = args.anchor_every == 1, args.stream_dtype is not None
    goals = GOALS.get((args.precision, c.mode, stores_all, narrow))
    return None if goals is None else goals[RESIDUALS[c.residual.removesuffix("-noec")]]


def sizes(args: argparse.Namespace) -> dict[str, Any]:
    """Bytes of an element of states and of features, and the mean length of a chain."""
    half = args.precision == "autocast"
    lengths = [index % args.anchor_every for index in range(2 * args.layers)]
    return {
        "state": 2 if half and args.stream_dtype else 4,
        "features": 2 if half else 4,
        "links": sum(lengths) / len(lengths),
    }


def find(candidates: list[Candidate], *key: str) -> Candidate | None:
    """The candidate (residual, form, mode, group), if it was timed."""
    for c in candidates:
        if (c.residual, c.form, c.mode, c.group) == key and c.red is None:
            return c
    return None


def tabulate(
    candidates: list[Candidate], copied: dict[str, Any], args: argparse.Namespace
) -> Table:
    table = Table(
        f"Training step, {' + '.join(STEP)}: d {args.hidden_size}, {args.layers} layers, "
        f"{args.heads} heads, T {args.time}, B {args.batch}, {kind(args)}, {args.threads} threads",
        COLUMNS,
        labels=3,
    )
    for c in candidates:
        s = summarise(c, candidates, copied, args)
        goal, paper = (f"{s[key]:g}" if s[key] is not None else "" for key in ("goal", "paper"))
        bound = f"{s['floor']:.3f}" if "floor" in s and c.residual != "additive" else ""
        faster = f"{s['faster_than_plain']:.2f}×" if "faster_than_plain" in s else ""
        table.add(c.mode, c.residual, c.form, *timing_cells(s), goal, bound, paper, faster)
    reasons = dict.fromkeys(c.red for c in candidates if c.red is not None)
    errors = [c.error for c in candidates if c.error is not None]
    drifts = [f"{c.drift:.3f}" for c in candidates if c.drift is not None]
    table.notes = [
        *(f"RED, not timed: {reason}" for reason in reasons),
        f"ratio: median(additive) / median of {args.rounds} interleaved rounds; 95 %: of the ratio "
        "over resampled rounds, a goal is reached (✓) if the upper end reaches it; "
        "floor: the ratio if every boundary moved its bytes at copy speed; "
        "paper: its published code; vs plain: ratio(fused) / ratio(plain), each to the additive "
        "model of the same rounds.",
        *(
            f"{mode}: copy {c['copy_gb_s']:.1f} GB/s, bytes read and written"
            for mode, c in copied.items()
        ),
        *compile_note(candidates),
        f"gate: largest rms error {max(errors, default=float('nan')):.1e}, allowed {TOLERANCE:.0e}",
        *[f"gradients of bfloat16, from those of float32: {', '.join(drifts)}"] * bool(drifts),
    ]
    return table


def compile_note(candidates: list[Candidate]) -> list[str]:
    """How long the first compiled steps took. The reported times exclude them."""
    waits = [
        f"{c.residual} {c.form} {c.compile_seconds:.0f}"
        for c in candidates
        if c.compile_seconds is not None
    ]
    if not waits:
        return []
    return [f"seconds of the first compiled step, few if a cache had it: {', '.join(waits)}"]


def timing_cells(s: dict[str, Any]) -> list[str]:
    """Milliseconds, quartiles, ratio (marked against its goal, if it has one), interval."""
    if s["gate"]["red"] is not None:
        return ["RED", "", "", ""]
    low, high = s["quartiles"]
    cells = [f"{1e3 * s['median']:.1f}", f"{1e3 * low:.1f}–{1e3 * high:.1f}"]
    if "ratio" not in s:
        return [*cells, "", ""]
    mark = "" if s["goal"] is None else " ✓" if s["interval"][1] >= s["goal"] else " ✗"
    return [*cells, f"{s['ratio']:.3f}{mark}", "{:.3f}–{:.3f}".format(*s["interval"])]


def kind(args: argparse.Namespace) -> str:
    """Precision, stored states and their dtype in words."""
    precision = "bfloat16 autocast" if args.precision == "autocast" else "float32"
    states = "" if args.stream_dtype is None else f", states in {args.stream_dtype}"
    return f"{precision}{states}, anchor_every {args.anchor_every}"


def to_record(
    candidates: list[Candidate], copied: dict[str, Any], args: argparse.Namespace
) -> dict[str, Any]:
    """The run as JSON types, without `record.environment()`."""
    names = "hidden_size layers heads time batch rounds backend quick"
    names += " anchor_every stream_dtype"
    config = {name: getattr(args, name) for name in names.split()}
    return {
        "benchmark": "train_step",
        "config": config | {"dtype": "float32", "autocast": args.precision == "autocast"},
        "step": STEP,
        "copies": copied,
        "peak_gib": round(machine.peak_bytes() / 2**30, 1),
        "results": [summarise(c, candidates, copied, args) for c in candidates],
    }
