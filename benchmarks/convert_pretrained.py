"""Validation losses of a pretrained nanoGPT that goes on as it was, converted at once, or annealed.

    python benchmarks/convert_pretrained.py            # ten minutes of one core
    python benchmarks/convert_pretrained.py --quick    # tiny, recorded nowhere

The stand-in for nanoGPT's GPT in tests/support is trained with additions on Python's documentation
(bytes), then goes on from there in every way with the same batches, learning rates and a fresh
AdamW: with additions, converted with `ddl.nanogpt.convert` and its defaults, converted with ε_k and
the value's bias at E = 30 (nearly an addition, and stays one), or with start="additive". A loss is
in nats per byte over evenly spread windows, the same ones always.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import sys
import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from common import record
from common.arguments import make_parser, parse
from ddl.lab import data
from ddl.lab.bench.tables import Table, progress
from ddl.lab.config import OptimConfig
from ddl.nanogpt import convert
from ddl.optim import learning_rate

Model = nn.Module
ROUNDING = 1e-4  # of a validation loss in float32
# pretrain: steps with additions. steps: afterwards, in every way. anneal: anneal_steps, a row each.
FULL = {
    "seeds": 3, "pretrain": 1500, "steps": 400, "anneal": [100, 200], "threads": 1,
    "width": 64, "layers": 4, "heads": 4, "block": 64, "batch": 12, "windows": 256,
}  # fmt: skip
QUICK = {
    "seeds": 1, "pretrain": 4, "steps": 4, "anneal": [2], "threads": 1,
    "width": 16, "layers": 2, "heads": 2, "block": 16, "batch": 2, "windows": 2,
}  # fmt: skip
WIDTHS: dict[str, dict[str, Any]] = {"m 1": {}, "m 4": {"value_channels": 4}}


def main(arguments: Sequence[str] | None = None) -> int:
    args = parse(make_parser(__doc__), arguments, full=FULL, quick=QUICK)
    args.lr, args.warmup = 1e-3, min(50, args.pretrain // 2)
    torch.set_num_threads(args.threads)
    where = record.environment()
    corpus = data.load("topics")
    losses: dict[str, list[dict[int, float]]] = {way: [] for way in ways(args)}
    norms = []
    began = time.perf_counter()
    for seed in range(args.seeds):
        progress(f"seed {seed}: pretraining")
        pretrained = make(args, seed)
        train(pretrained, corpus, args, args.pretrain, seed, {args.pretrain})
        norms.append(stream_norms(pretrained, corpus, args))
        for way, options in ways(args).items():
            progress(f"seed {seed}: {way}")
            model = copy.deepcopy(pretrained)
            model = model if options is None else convert(model, **options)
            losses[way].append(train(model, corpus, args, args.steps, 1000 + seed, marks(args)))
        for way, options in ways(args).items():
            check(way, options, losses[way][-1][0], losses["additions"][-1][0])
    table = tabulate(losses, norms, args)
    minutes = (time.perf_counter() - began) / 60
    run = {
        "benchmark": "convert_pretrained",
        "config": {name: value for name, value in vars(args).items() if name != "out"},
        "minutes": minutes,
        "norms": norms,
        "losses": losses,
    }
    record.publish("convert_pretrained", where, run, table, args.out)
    return 0


def ways(args: argparse.Namespace) -> dict[str, dict[str, Any] | None]:
    """The rows of the table: options of `convert`, None for the model as it was."""
    found: dict[str, dict[str, Any] | None] = {"additions": None}
    for name, width in WIDTHS.items():
        found[f"{name}, at once"] = width
        found[f"{name}, E = 30"] = {**width, "eps_k": 30.0, "value_init": 30.0}
        for steps in args.anneal:
            annealed = {"start": "additive", "anneal_steps": steps}
            found[f"{name}, annealed over {steps}"] = {**width, **annealed}
    return found


def marks(args: argparse.Namespace) -> set[int]:
    """The steps after which the loss is taken."""
    usual = {0, 10, 50, 100, 200, 300}
    return {mark for mark in usual if mark < args.steps} | {args.steps}


def make(args: argparse.Namespace, seed: int) -> Model:
    sys.path.insert(0, str(record.ROOT))
    from tests.support.nanogpt_standin import GPT, GPTConfig

    torch.manual_seed(seed)
    sizes = {"n_layer": args.layers, "n_head": args.heads, "n_embd": args.width}
    return GPT(GPTConfig(block_size=args.block, vocab_size=256, bias=False, **sizes))


def train(
    model: Any, corpus: data.Corpus, args: argparse.Namespace, steps: int, seed: int, at: set[int]
) -> dict[int, float]:
    """Train on batches of `seed`; return the validation losses after the steps `at`."""
    config = OptimConfig(lr=args.lr, warmup_steps=args.warmup, betas=(0.9, 0.99))
    optimizer = model.configure_optimizers(config.weight_decay, config.lr, config.betas, "cpu")
    losses = {0: validate(model, corpus, args)} if 0 in at else {}
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(config, step, steps)
        tokens = data.batch(corpus.train, args.batch, args.block + 1, seed=seed, step=step).tokens
        optimizer.zero_grad()
        model(tokens[:, :-1], tokens[:, 1:].contiguous())[1].backward()
        nn.utils.clip_grad_norm_(model.parameters(), config.clip)
        optimizer.step()
        if step + 1 in at:
            losses[step + 1] = validate(model, corpus, args)
    return losses


@torch.no_grad()
def validate(model: Any, corpus: data.Corpus, args: argparse.Namespace) -> float:
    """Mean loss per byte over evenly spread windows of the validation part."""
    sums, count = 0.0, 0
    size = min(32, args.windows)
    for tokens, _ in data.evaluation_batches(
        corpus.validation, size, args.block + 1, args.windows // size
    ):
        loss = model(tokens[:, :-1], tokens[:, 1:].contiguous())[1]
        sums, count = sums + len(tokens) * loss.item(), count + len(tokens)
    return sums / count


@torch.no_grad()
def stream_norms(model: Any, corpus: data.Corpus, args: argparse.Namespace) -> float:
    """Root mean square over tokens of the norm of the last state, |X|: what E has to exceed."""
    norms: list[float] = []
    hook = model.transformer.ln_f.register_forward_pre_hook(
        lambda _, given: norms.append(given[0].norm(dim=-1).square().mean().sqrt().item())
    )
    validate(model, corpus, args)
    hook.remove()
    return statistics.mean(norms)


def check(way: str, options: dict[str, Any] | None, loss: float, before: float) -> None:
    """Raise unless a model that starts with additions has the loss of the one before."""
    if options is not None and "start" in options and abs(loss - before) > ROUNDING:
        raise AssertionError(f"{way} starts at {loss}, and the model before it at {before}")


def tabulate(
    losses: dict[str, list[dict[int, float]]], norms: list[float], args: argparse.Namespace
) -> Table:
    title = (
        f"Validation loss after a conversion: d {args.width}, {args.layers} layers, T {args.block},"
        f" B {args.batch}, {args.pretrain} steps with additions before, seeds: {args.seeds}"
    )
    at = sorted(marks(args))
    last = at[-1]
    names = [f"step {mark}" for mark in at]
    table = Table(title, ("way", *names, "at the end, − additions"))
    for way, runs in losses.items():
        cells = [spread([run[mark] for run in runs]) for mark in at]
        pairs = zip(runs, losses["additions"], strict=True)
        gaps = [run[last] - base[last] for run, base in pairs]
        table.add(way, *cells, "" if way == "additions" else spread(gaps, sign="+"))
    table.notes = [
        "mean ± standard deviation over the seeds, nats per byte; the last column is of the "
        "differences seed by seed. |X| of the last state before the conversion: "
        f"{spread(norms, digits=1)}."
    ]
    return table


def spread(numbers: Sequence[float], *, sign: str = "", digits: int = 3) -> str:
    mean = f"{statistics.mean(numbers):{sign}.{digits}f}"
    return mean if len(numbers) < 2 else f"{mean} ± {statistics.stdev(numbers):.{digits}f}"


if __name__ == "__main__":
    sys.exit(main())
