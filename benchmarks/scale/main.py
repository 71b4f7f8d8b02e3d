"""The tables of docs/scale.md: three models with m = 4, on 1 to 1,024 GPUs, in bfloat16."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from ddl.lab.config import GPTConfig, TrainConfig

from .memory import gathered, host_bytes, peak, state
from .parameters import count
from .traffic import sent

PAGE = Path(__file__).resolve().parents[2] / "docs" / "scale.md"
MARKS = ("<!-- tables: begin. `python benchmarks/scale --write` writes them. -->", "<!-- end -->")
GPUS = (1, 8, 64, 1024)
ROOM = 80e9  # bytes of a GPU

# The shapes of the papers' small model, of GPT-3 XL and of LLaMA 7B. Their batch is that of one
# process in one forward pass.
MODELS = {
    "124M": TrainConfig(model=GPTConfig(), batch_size=12),
    "1B": TrainConfig(
        model=GPTConfig(block_size=2048, num_layers=24, num_heads=16, hidden_size=2048),
        batch_size=4,
    ),
    "7B": TrainConfig(
        model=GPTConfig(block_size=4096, num_layers=32, num_heads=32, hidden_size=4096),
        batch_size=1,
    ),
}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="replace the tables in docs/scale.md")
    args = parser.parse_args(arguments)
    if args.write:
        before, _, after = parts(PAGE.read_text(encoding="utf-8"))
        PAGE.write_text(f"{before}{tables()}{after}", encoding="utf-8")
    else:
        print(tables())
    return 0


def parts(page: str) -> tuple[str, str, str]:
    """The page up to its tables, the tables, and what is behind them."""
    begin, end = MARKS
    before, rest = page.split(begin)
    inside, after = rest.split(end)
    return f"{before}{begin}", inside, f"{end}{after}"


def tables() -> str:
    made = (of_models(), of_processes())
    return "\n\n" + "\n\n".join(made) + "\n\n"


def additive(config: TrainConfig) -> TrainConfig:
    return replace(config, model=replace(config.model, residual="additive"))


def anchored(config: TrainConfig, every: int | None) -> TrainConfig:
    return replace(config, model=replace(config.model, anchor_every=every))


def spread_over(config: TrainConfig, processes: int, parallel: str) -> TrainConfig:
    """With one forward pass of each process in a step."""
    return replace(config, accumulation=processes, parallel=parallel)


def table(title: str, head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [title, "", f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    return "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in rows)])


def gb(number: float) -> str:
    """Bytes in GB with three digits, if there are as many before the tenth of a MB."""
    size = number / 1e9
    return f"{size:.0f}" if size >= 100 else f"{size:.1f}" if size >= 10 else f"{size:.2f}"


def of_models() -> str:
    def row(name: str, config: TrainConfig) -> list[str]:
        model = config.model
        shape = f"{model.hidden_size} · {model.num_layers} · {model.num_heads} · {model.mlp_hidden}"
        numbers = [f"{count(c.model):,}" for c in (config, additive(config))]
        batch = f"{config.batch_size} × {model.block_size}"
        return [name, shape, *numbers, batch, gb(host_bytes(config))]

    return table(
        "Parameters, the batch of a process, and the CPU's memory for the model, GB:",
        ["", "d · layers · heads · f", "`ddl-cc`", "additive", "B × T", "host"],
        [row(name, config) for name, config in MODELS.items()],
    )


def of_processes() -> str:
    """Held, the most, and sent, by the number of GPUs."""

    def figures(config: TrainConfig, processes: int, parallel: str) -> list[str]:
        used = spread_over(config, processes, parallel)
        most = [max(peak(replace(used, recompute=again), processes)) for again in (False, True)]
        if min(most) > ROOM:
            return [f"({gb(state(used, processes).all)})", "–", "–", "–"]
        return [
            gb(state(used, processes).all),
            *(gb(each) if each <= ROOM else "–" for each in most),
            gb(sent(used, processes)),
        ]

    def row(name: str, config: TrainConfig, processes: int) -> list[str]:
        row = [name, f"{processes:,}", *figures(config, processes, "ddp")]
        if processes == 1:
            return [*row, *[""] * 5]
        used = spread_over(config, processes, "fsdp2")
        held, *rest = figures(config, processes, "fsdp2")
        return [*row, held, gb(gathered(used, processes)), *rest]

    return table(
        "`ddl-cc`, GB of a process: what it holds between steps, with FSDP2 what it gathers, the"
        " most in a step (stored, and with `--recompute`), and what it sends in a step. –: does not"
        " fit in 80 GB.",
        [
            *("", "GPUs", "DDP holds", "most", "recomputed", "sends"),
            *("FSDP2 holds", "gathers", "most", "recomputed", "sends"),
        ],
        [row(name, config, gpus) for name, config in MODELS.items() for gpus in GPUS],
    )
