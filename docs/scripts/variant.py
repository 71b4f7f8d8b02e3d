"""The box "Which variant?" of README.md, index.md and nanogpt.md, with numbers from records."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from typing import Any

from study import page, records
from study.pictures import BASELINE, Variants
from study.records import Record, Trained

from . import gpu

BEST, CONVOLVED = "tc-none", "additive-conv"
STREAM = 'value_channels=4, compress="token", expand="conv", erase="none"'
BOX = (
    "**For the lowest loss** train `ddl-tc-none`: token reads, nothing erased. Its learning rate "
    "was {lr:g}, {times_lr:g} times the additive one.",
    "nanoGPT, at the end of model.py: "
    "`import ddl.nanogpt; GPT = ddl.nanogpt.converted(GPT, {stream})`",
    "An untrained decoder of transformers: "
    "`import ddl.hf; model = ddl.hf.convert(model, {stream}, start=None)`",
    "From nothing: `ddl train demo --model.residual ddl-tc-none --optim.lr {lr:g}`",
    "**Gain** at d {d}, nats per byte: {gain:.3f} at equal tokens, {gain_in_time:.3f} at equal "
    "seconds of one CPU thread. `additive-conv`, its convolution alone, gains {convolved:.3f} "
    "and takes {convolved_time:.2f} times as long as additions.",
    "**Cost on a CPU**: a step takes {time:.2f} times as long on one thread at d {d}. At d {wide} "
    "`ddl-tc` has {speed:.2f} of the additive speed (compiled) and keeps {kept:.2f} times the "
    "memory.",
    "**Cost on a GPU** (one {gpu}, 124M parameters, compiled, autocast): `ddl-tc` has "
    "{gpu_speed:.2f} of the speed and needs {gpu_memory:.2f} times the memory: in equal time it "
    "sees {gpu_speed:.0%} of the tokens. Whether it is still better then was not tried.",
    "**The papers' own** `ddl`, `ddl-cc` and `ddl-tc` repeat the papers and show what erasing "
    "does. `ddl-cc`, the default of the modules, could not be told from additions.",
    "**Nobody knows** whether this holds for larger models, longer training or other text "
    "([the study](../docs/results.md)).",
)


def box(newest: Callable[[str], dict[str, Any]]) -> str:
    """The box. newest: the last record of benchmarks/results, by its name."""
    found = of_the_study() | on_a_cpu(newest("streams")) | on_a_gpu()
    return "\n".join(f"- {line.format(stream=STREAM, **found)}" for line in BOX)


def of_the_study() -> dict[str, float]:
    main, times = page.compared(records.FOLDER), page.read_cost(records.FOLDER)
    seconds = records.read("equal-seconds", records.FOLDER)
    base, best = (one_of(main[name])["config"] for name in (BASELINE, BEST))
    return {
        "d": base["model"]["hidden_size"],
        "lr": best["optim"]["lr"],
        "times_lr": best["optim"]["lr"] / base["optim"]["lr"],
        "gain": gain(main, main[BEST]),
        "gain_in_time": gain(main, seconds[BEST]),
        "convolved": gain(main, main[CONVOLVED]),
        "time": times[BEST],
        "convolved_time": times[CONVOLVED],
    }


def one_of(runs: Mapping[int, Trained]) -> Record:
    """The record of one of a variant's runs."""
    return next(iter(runs.values())).record


def gain(main: Variants, runs: Mapping[int, Trained]) -> float:
    """How much lower the loss is than the additive one, on average over the seeds of both."""
    base = main[BASELINE]
    return statistics.mean(base[seed].loss - runs[seed].loss for seed in base.keys() & runs.keys())


def on_a_cpu(record: dict[str, Any]) -> dict[str, float]:
    rows = {row["residual"]: row for row in record["results"]}
    return {
        "wide": record["config"]["hidden_size"],
        "speed": rows["ddl-tc"]["compiled"]["ratio"],
        "kept": rows["ddl-tc"]["kept"] / rows["additive"]["kept"],
    }


def on_a_gpu() -> dict[str, Any]:
    lines, _ = gpu.records()
    step = gpu.of_step(lines, "float32", None, "ddl-tc", "tied")
    return {
        "gpu": step["device"].removeprefix("NVIDIA "),
        "gpu_speed": step["ratio"],
        "gpu_memory": step["memory_factor"],
    }
