"""Fine-tune a Llama that was trained with additions: as it is, with an adapter, and converted.

    python -m study.finetune              # trains what has no record in study/records yet
    python -m study.finetune --page       # writes the table of docs/decoders.md
    python -m study.finetune --page --check

A Llama of 0.9 million parameters reads the bytes of all packages of study/corpus.jsonl but one.
Then each variant is trained on that one, git's manual, from the same weights: the learning rate is
the best of three or more on a seed of its own (as long as the best is the lowest or the highest,
one a third or three times as high is tried), and three other seeds give the loss on held-out pages.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from ddl import hf
from ddl.optim import OptimConfig, learning_rate, parameter_groups, set_learning_rate
from docs.scripts.marked import write_tables

from . import records
from .records import Record

HERE = Path(__file__).parent
PAGE = HERE.parent / "docs" / "decoders.md"
OUT = records.FOLDER / "finetune" / "llama.jsonl"
LEFT_OUT = "git-doc"  # the package of the second text
BATCH, BLOCK = 8, 256
STEPS, FINETUNED, WARMUP = 1500, 300, 30
HELD_OUT = 10  # every tenth page
WINDOWS = 64  # of held-out text
TUNED_ON, SEEDS, RATES = 101, (1, 2, 3), (5e-4, 1.5e-3, 4.5e-3)
DECODER = LlamaConfig(
    vocab_size=256,
    hidden_size=128,
    intermediate_size=352,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=4,
    max_position_embeddings=BLOCK,
    bos_token_id=None,
    eos_token_id=None,
)
CONVERTED: dict[str, Any] = {"value_channels": 4, "compress": "token"}
VARIANTS: dict[str, dict[str, Any] | None] = {
    "with its additions": None,
    "adapter": {**CONVERTED, "train": "stream"},
    "converted": {**CONVERTED, "anneal_steps": FINETUNED // 3},
}


def texts() -> dict[str, Tensor]:
    """Bytes to train on and held out, before and after: one page after the other."""
    parts: dict[str, list[str]] = {}
    lines = (HERE / "corpus.jsonl").read_text(encoding="utf-8").splitlines()
    for number, document in enumerate(map(json.loads, lines)):
        which = "second" if document["source"].startswith(LEFT_OUT) else "first"
        use = "held out" if number % HELD_OUT == 0 else "train"
        parts.setdefault(f"{which} {use}", []).append(document["text"])
    return {
        name: torch.frombuffer(bytearray("\n\n".join(pages).encode()), dtype=torch.uint8).long()
        for name, pages in parts.items()
    }


def windows(text: Tensor, count: int, generator: torch.Generator | None = None) -> Tensor:
    """Windows (count, BLOCK + 1): drawn, or spread evenly over the text."""
    last = len(text) - BLOCK - 1
    if generator is None:
        starts = torch.linspace(0, last, count).long()
    else:
        starts = torch.randint(last, (count,), generator=generator)
    return torch.stack([text[start : start + BLOCK + 1] for start in starts.tolist()])


def loss_of(model: Any, tokens: Tensor) -> Tensor:
    logits = model(tokens[:, :-1], use_cache=False).logits
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


@torch.inference_mode()
def held_out(model: Any, text: Tensor) -> float:
    """The loss in nats per byte."""
    parts = windows(text, WINDOWS).split(BATCH)
    return statistics.fmean(float(loss_of(model.eval(), part)) for part in parts)


def train(model: Any, text: Tensor, steps: int, lr: float, seed: int) -> None:
    config = OptimConfig(lr=lr, warmup_steps=WARMUP)
    groups = parameter_groups(model.train(), config.weight_decay)
    optimizer = torch.optim.AdamW(groups, lr=lr, betas=config.betas, fused=True)
    generator = torch.Generator().manual_seed(seed)
    for step in range(steps):
        set_learning_rate(optimizer, learning_rate(config, step, steps))
        optimizer.zero_grad()
        loss_of(model, windows(text, BATCH, generator)).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), config.clip)
        optimizer.step()


def decoder(folder: Path, text: dict[str, Tensor]) -> LlamaForCausalLM:
    """The decoder that was trained with additions; trained and saved if it is not there."""
    if not (folder / "model.safetensors").exists():
        torch.manual_seed(0)
        model = LlamaForCausalLM(DECODER)
        train(model, text["first train"], STEPS, 3e-3, 0)
        model.save_pretrained(folder)
    return LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)


def record_of(variant: str, lr: float, seed: int, folder: Path, text: Any) -> Record:
    """Fine-tune a variant."""
    begun = time.process_time()
    model: Any = decoder(folder, text)
    before = held_out(model, text["second held out"])
    options = VARIANTS[variant]
    if options is not None:
        torch.manual_seed(seed)
        hf.convert(model, **options)
    train(model, text["second train"], FINETUNED, lr, seed)
    return {
        "name": f"{variant}-lr{lr:g}-s{seed}",
        "variant": variant,
        "lr": lr,
        "seed": seed,
        "trained": sum(p.numel() for p in model.parameters() if p.requires_grad),
        "before": before,
        "loss": held_out(model, text["second held out"]),
        "first_loss": held_out(model, text["first held out"]),
        "processor_seconds": round(time.process_time() - begun),
        "processor": records.processor(torch.device("cpu")),
    }


def run(out: Path, folder: Path) -> None:
    """Train what has no record yet."""
    text = texts()
    for variant in VARIANTS:
        while missing := [run for run in planned(variant, out) if run not in done(variant, out)]:
            found = record_of(variant, *missing[0], folder, text)
            records.keep(out, found)
            print(f"{found['name']}: {found['before']:.4f} → {found['loss']:.4f}", flush=True)


def done(variant: str, out: Path) -> dict[tuple[float, int], Record]:
    """The records of a variant by learning rate and seed."""
    kept = records.by_name(out).values()
    return {(r["lr"], r["seed"]): r for r in kept if r["variant"] == variant}


def planned(variant: str, out: Path) -> list[tuple[float, int]]:
    """Rates and seeds of the runs that can be planned with the records so far."""
    tuned = {lr: -r["loss"] for (lr, seed), r in done(variant, out).items() if seed == TUNED_ON}
    rates, best = records.rates_tried(RATES, tuned, factor=3)
    runs = [(lr, TUNED_ON) for lr in rates]
    return runs if best is None else [*runs, *((best, seed) for seed in SEEDS)]


def best_rate(variant: str, out: Path) -> float | None:
    """The learning rate with the lowest loss, once all seeds were trained with it."""
    planned_last = planned(variant, out)[-1]
    known = planned_last[1] != TUNED_ON and planned_last in done(variant, out)
    return planned_last[0] if known else None


def table(out: Path) -> str:
    """Losses of every variant, in nats per byte."""
    kept = list(records.by_name(out).values())
    best = {variant: best_rate(variant, out) for variant in VARIANTS}
    if None in best.values():
        return "Not trained yet."
    rows = [
        "| | trained parameters | learning rate | loss on the second text | on the first |",
        "|---|---|---|---|---|",
    ]
    before = {record["before"] for record in kept}
    rows.append(f"| as it was | 0 | | {statistics.fmean(before):.3f} | |")
    for variant in VARIANTS:
        lr = best[variant]
        found = [r for r in kept if (r["variant"], r["lr"]) == (variant, lr)]
        found = [r for r in found if r["seed"] in SEEDS]
        losses, others = ([r[name] for r in found] for name in ("loss", "first_loss"))
        rows.append(
            f"| {variant} | {found[0]['trained']:,} | {lr:g} | {spread(losses)} | "
            f"{spread(others)} |"
        )
    hours = sum(record["processor_seconds"] for record in kept) / 3600
    processors = ", ".join(sorted({record["processor"] for record in kept}))
    end = f"Means (lowest–highest) of three seeds; {len(kept)} runs, {hours:.1f} hours of a core"
    return "\n".join([*rows, "", f"{end} ({processors})."])


def spread(losses: list[float]) -> str:
    return f"{statistics.fmean(losses):.3f} ({min(losses):.3f}–{max(losses):.3f})"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--records", type=Path, default=OUT, help="where to keep them")
    parser.add_argument("--decoder", type=Path, default=HERE / "data" / "decoder")
    parser.add_argument("--page", action="store_true", help="write the page, train nothing")
    parser.add_argument("--check", action="store_true", help="with --page: change nothing")
    args = parser.parse_args(arguments)
    if not args.page:
        run(args.records, args.decoder)
        return 0
    made = {"finetune": table(args.records)}
    return write_tables(PAGE, made, command="study.finetune --page", check=args.check)


if __name__ == "__main__":
    sys.exit(main())
