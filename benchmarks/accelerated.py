"""transformers' models of the delta rule, with random weights, before and after our kernel.

    python benchmarks/accelerated.py            # minutes
    python benchmarks/accelerated.py --quick    # the same path in small: seconds, recorded nowhere

Prefill, a step of generation after it, and a training step; float32, interleaved, processor time.
Logits and gradients must agree first, else the row is red and the exit status 1.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import transformers
from torch import Tensor

from common import record
from common.arguments import make_parser, parse
from ddl.hf import accelerate_delta_rule
from ddl.lab.bench.measure import MismatchError, Timed, compare, interleave, ratio, ratio_interval
from ddl.lab.bench.tables import Table

FULL = {"width": 512, "layers": 4, "time": 1024, "rounds": 9, "threads": 1}
QUICK = FULL | {"width": 64, "time": 40, "rounds": 2}
HEAD = 64  # features of a head
PARTS = ("prefill", "step", "training")


def main(arguments: Sequence[str] | None = None) -> int:
    args = parse(make_parser(__doc__), arguments, full=FULL, quick=QUICK)
    torch.set_num_threads(args.threads)
    where = record.environment()
    results = [measure(name, args) for name in ("Qwen3Next", "KimiLinear")]
    config = {name: getattr(args, name) for name in ("width", "layers", "time", "rounds", "quick")}
    run = {"benchmark": "accelerated", "config": config, "results": results}
    record.publish("accelerated", where, run, tabulate(results, args), args.out)
    return 1 if any(result["red"] for result in results) else 0


def make(name: str, args: argparse.Namespace) -> Any:
    """A model in which three of four layers have the delta rule, and few experts."""
    heads = max(1, args.width // HEAD)
    kinds = ["linear_attention"] * 3 + ["full_attention"]
    sizes: dict[str, Any] = {
        "vocab_size": 1024,
        "hidden_size": args.width,
        "intermediate_size": 2 * args.width,
        "num_hidden_layers": args.layers,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": args.width,
        "pad_token_id": 0,
        "bos_token_id": None,
        "eos_token_id": None,
        "layer_types": (kinds * args.layers)[: args.layers],
    }
    if name == "Qwen3Next":
        sizes |= {"shared_expert_intermediate_size": args.width, "head_dim": HEAD}
        sizes |= {f"linear_num_{of}_heads": heads for of in ("key", "value")}
        sizes |= {f"linear_{of}_head_dim": HEAD for of in ("key", "value")}
    else:
        sizes |= {"linear_num_heads": heads, "linear_head_dim": HEAD}
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**sizes)
    return getattr(transformers, f"{name}ForCausalLM")(config)


def measure(name: str, args: argparse.Namespace) -> dict[str, Any]:
    """The results of one model as JSON types."""
    model, result = make(name, args), {"model": name, "red": None}
    idx = torch.randint(1024, (1, args.time), generator=torch.Generator().manual_seed(1))
    before = computed(model, idx)
    undo = accelerate_delta_rule()
    after = computed(model, idx)
    undo()
    try:
        result["error"] = compare({n: (after[n], before[n]) for n in before}, 1e-3)
    except MismatchError as difference:
        return result | {"red": str(difference)}
    for part in PARTS:
        call = part_of(model, idx, part)
        steps = {"before": timed(call), "after": accelerated(timed(call))}
        seconds = interleave(steps, args.rounds, warmup=1, what=f"{name}, {part}")
        theirs, ours = ([row[0] for row in seconds[which]] for which in ("before", "after"))
        result[part] = {
            "before_seconds": theirs,
            "after_seconds": ours,
            "ratio": ratio(theirs, ours),
            "interval": ratio_interval(theirs, ours),
        }
    return result


def computed(model: Any, idx: Tensor) -> dict[str, Tensor]:
    """Logits, and the gradients of what comes before a layer of the delta rule."""
    model.zero_grad(set_to_none=True)
    found = model(idx, labels=idx)
    found.loss.backward()
    embedding = model.get_input_embeddings().weight.grad
    return {"logits": found.logits.detach(), "gradient of the embedding": embedding}


def part_of(model: Any, idx: Tensor, part: str) -> Callable[[], object]:
    if part == "training":
        return lambda: model(idx, labels=idx).loss.backward()
    inference = torch.inference_mode()
    if part == "prefill":
        return inference(lambda: model(idx, use_cache=True))
    cache = inference(lambda: model(idx, use_cache=True))().past_key_values
    return inference(lambda: model(idx[:, :1], past_key_values=cache, use_cache=True))


def timed(call: Callable[[], object]) -> Timed:
    def run() -> tuple[float]:
        call()  # what ran before has left the caches full of other things
        start = time.process_time()
        call()
        return (time.process_time() - start,)

    return run


def accelerated(run: Timed) -> Timed:
    """The same with our kernel; to replace functions takes no part of the time."""

    def with_ours() -> tuple[float, ...]:
        undo = accelerate_delta_rule()
        try:
            return run()
        finally:
            undo()

    return with_ours


def tabulate(results: list[dict[str, Any]], args: argparse.Namespace) -> Table:
    table = Table(
        f"transformers {transformers.__version__} before over after `accelerate_delta_rule`: "
        f"width {args.width}, {args.layers} layers, {args.time} tokens, float32, "
        f"{args.threads} thread(s)",
        ("model", *(cell for part in PARTS for cell in (part, "before, ms", "after, ms"))),
    )
    for r in results:
        if r["red"]:
            table.add(r["model"], "RED", *[""] * 8)
            table.notes.append(f"RED, not timed: {r['model']}: {r['red']}")
            continue
        cells = [r["model"]]
        for part in PARTS:
            times = (1e3 * statistics.median(r[part][f"{n}_seconds"]) for n in ("before", "after"))
            cells += [f"{r[part]['ratio']:.2f}×", *(f"{ms:.1f}" for ms in times)]
        table.add(*cells)
    table.notes.append(f"Ratios of medians over {args.rounds} interleaved rounds, processor time.")
    return table


if __name__ == "__main__":
    sys.exit(main())
