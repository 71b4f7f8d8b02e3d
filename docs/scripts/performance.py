"""Write the tables of performance.md, gpu.md, variants.md and README, and the box "Which variant?".

python -m docs.scripts.performance          # after a benchmark has appended its record
python -m docs.scripts.performance --check  # says which page is not current, exit status 1
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ddl.files import write_text

from . import gpu, variant
from .marked import fill

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"
RESIDUALS = ("ddl", "ddl-cc", "ddl-tc")
STREAMS = (("ddl", 1), ("ddl-cc", 4), ("ddl-cc", 16), ("ddl-tc", 4), ("ddl-tc", 16))  # with m
OURS = "**ddl-rs**"
FLOOR = "the bytes that must move, at the speed of a copy"

Record = dict[str, Any]


def newest(name: str) -> Record:
    """The last record of benchmarks/results/NAME.jsonl."""
    return json.loads((RESULTS / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()[-1])


def source(*names: str) -> str:
    """Lines about the records: for each machine, their dates and commits."""
    machines: dict[str, list[str]] = {}
    for name in names:
        record = newest(name)
        machine = record["machine"]
        where = (
            f"{machine['cores']} cores of {machine['cpu']} ({machine['simd']}),"
            f" torch {record['torch'].partition('+')[0]}"
        )
        machines.setdefault(where, []).append(
            f"[{name}](../benchmarks/results/{name}.md) of {record['date'][:10]},"
            f" commit {record['commit']['hash'][:7]}"
        )
    return "\n".join(f"On {where}: {'; '.join(found)}." for where, found in machines.items())


def training() -> str:
    """The speed of a training step, over that of the additive residual on the same backbone."""
    step, anchors, autocast = map(
        newest, ("train_step", "train_step-anchors-12", "train_step-autocast")
    )
    plain = "the same in plain PyTorch, each part in its fastest form"
    paper = "the papers' published code (on an Intel Xeon)"
    every = anchors["config"]["anchor_every"]
    rows = [_head("", "", *(f"`{name}`" for name in RESIDUALS))]
    for mode in ("eager", "compiled"):
        rows += [
            _speeds(step, mode, told=OURS, label=f"{mode}, every state stored"),
            _speeds(step, mode, told=plain, form="plain"),
            _speeds(step, mode, told=paper, field="paper"),
            _speeds(step, mode, told=FLOOR, field="floor"),
        ]
    label = f"compiled, `anchor_every={every}`, the default on a CPU with {every} sublayers"
    rows += [
        _speeds(anchors, "compiled", told=OURS, label=label),
        _speeds(
            autocast, "compiled", told=OURS, label="compiled, bfloat16 autocast, every state stored"
        ),
        _speeds(autocast, "compiled", told=FLOOR, field="floor"),
    ]
    return "\n".join(rows)


def memory() -> str:
    """Bytes that the forward of a step keeps for its backward, over the additive residual's."""
    record = newest("memory")
    found = {
        (row["residual"], row["value_channels"], row["anchor_every"]): row["saved_over_additive"]
        for row in record["results"]
        if row["mode"] == "eager"
    }
    every = sorted({number for _, _, number in found})
    rows = [_head("", "m", *(f"N = {number}" for number in every))]
    for residual, channels in STREAMS:
        numbers = [f"{found[residual, channels, number]:.2f}" for number in every]
        rows.append(_row(f"`{residual}`", str(channels), *numbers))
    return "\n".join(rows)


def generation() -> str:
    """Tokens per second of cached generation, over the additive residual's."""
    record = newest("decode")
    names = (f"`{name}`" for name in RESIDUALS)
    rows = [_head("sequences", "interface", "additive, tokens/s", *names)]
    for batch in sorted({row["batch"] for row in record["results"]}):
        for interface in ("ddl", "transformers"):
            own = {
                row["residual"]: row
                for row in record["results"]
                if (row["batch"], row["interface"]) == (batch, interface)
            }
            ratios = [_uncertain(own[name]) for name in RESIDUALS]
            tokens = f"{own['additive']['tokens_per_second']:,.0f}"
            rows.append(_row(str(batch), interface, tokens, *ratios))
    return "\n".join(rows)


def operators() -> str:
    """The speed of the fused operator at d = 768 and m = 4, in percent of a copy's."""
    rows = [_head("rewrites", "read", "forward", "backward")]
    for row in newest("ops")["results"]:
        if (row["op"], row["d"], row["m"]) == ("rewrite_read", 768, 4):
            shares = [
                f"{100 * row[way]['gb_s'] / row['copy']['gb_s']:.0f} %"
                for way in ("forward", "backward")
            ]
            rows.append(_row(str(row["rewrites"]), row["form"], *shares))
    return "\n".join(rows)


def baselines() -> str:
    """Parameters, FLOPs, kept bytes and compiled speed of residuals over the additive one's."""
    columns = ("residual", "parameters", "FLOPs", "kept bytes", "speed, compiled")
    results = newest("streams")["results"]
    base, rows = results[0], [_head(*columns)]
    for row in results:
        ratios = [f"{row[name] / base[name]:.3f}" for name in ("parameters", "flops", "kept")]
        rows.append(_row(f"`{row['residual']}`", *ratios, _uncertain(row["compiled"])))
    return "\n".join(rows)


def _speeds(
    record: Record,
    mode: str,
    *,
    told: str,
    label: str = "",
    form: str = "fused",
    field: str = "ratio",
) -> str:
    found = {
        row["residual"]: row[field]
        for row in record["results"]
        if (row["mode"], row["form"]) == (mode, form)
    }
    numbers = ["–" if found[name] is None else f"{found[name]:.2f}" for name in RESIDUALS]
    return _row(label, told, *(f"**{number}**" if told == OURS else number for number in numbers))


def _uncertain(row: Record) -> str:
    low, high = row["interval"]
    return f"{row['ratio']:.2f} ({low:.2f}–{high:.2f})"


def _head(*cells: str) -> str:
    return _row(*cells) + "\n" + "|---" * len(cells) + "|"


def _row(*cells: str) -> str:
    return "| " + " | ".join(cells) + " |"


def tables() -> dict[str, str]:
    """Every marked table by its name."""
    steps = ("train_step", "train_step-anchors-12", "train_step-autocast")
    made: dict[str, tuple[Callable[[], str], tuple[str, ...]]] = {
        "training": (training, steps),
        "memory": (memory, ("memory",)),
        "generation": (generation, ("decode",)),
        "operators": (operators, ("ops",)),
        "baselines": (baselines, ("streams",)),
    }
    return {name: f"{make()}\n\n{source(*records)}" for name, (make, records) in made.items()}


def pages() -> Mapping[Path, str]:
    """The pages with tables, as they should be."""
    made, on_gpu = tables(), gpu.tables()
    streams = {"baselines": made.pop("baselines")}
    of_anchors = {"gpu-anchors": on_gpu["gpu-anchors"].replace("](../", "](../../")}
    docs = ROOT / "docs"
    box = variant.box(newest)
    speeds = "\n".join(row for row in made["training"].splitlines() if FLOOR not in row)
    for_readme = {"training": speeds, "which-variant": box}
    for_readme = {name: text.replace("](../", "](") for name, text in for_readme.items()}
    for_docs = {"which-variant": box.replace("](../docs/", "](")}
    marked = {
        docs / "performance.md": made,
        docs / "gpu.md": on_gpu,
        docs / "index.md": for_docs,
        docs / "nanogpt.md": for_docs,
        docs / "decisions" / "anchors.md": of_anchors,
        docs / "variants.md": streams,
        ROOT / "README.md": for_readme,
    }
    return {
        page: fill(page.read_text("utf-8"), texts, name=page.name) for page, texts in marked.items()
    }


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--check", action="store_true", help="write nothing; say what is stale")
    check = parser.parse_args(arguments).check
    stale = {path: text for path, text in pages().items() if path.read_text("utf-8") != text}
    for path, text in stale.items():
        if check:
            print(f"{path.relative_to(ROOT)} is not current: python -m docs.scripts.performance")
        else:
            write_text(path, text)
    return int(check and bool(stale))


if __name__ == "__main__":
    sys.exit(main())
