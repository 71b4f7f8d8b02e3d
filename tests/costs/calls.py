"""Operator calls and allocations of a step of a tiny model, as torch's profiler sees them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from ddl.lab.config import PUBLISHED
from ddl.models import GPT, Cache, GPTConfig
from tests.support import ROOT

SIZES = {"num_layers": 2, "num_heads": 2, "hidden_size": 64, "vocab_size": 128}
BATCH, TIME = 2, 8
WARM_UP = 3  # steps; the first ones fill caches

Counts = dict[str, int]


def in_a_child() -> dict[str, dict[str, Counts]]:
    """Count all steps in a fresh process, because counts depend on torch's global settings."""
    program = [sys.executable, "-m", "tests.costs.calls"]
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    child = subprocess.run(program, cwd=ROOT, env=env, stdout=subprocess.PIPE, check=True)
    return json.loads(child.stdout)


def all_steps() -> dict[str, dict[str, Counts]]:
    return {
        "training step": {residual: training_step(residual) for residual in PUBLISHED},
        "decode step": {residual: decode_step(residual) for residual in PUBLISHED},
    }


def training_step(residual: str) -> Counts:
    """Count forward and backward."""
    model, idx = tiny(residual)

    def step() -> None:
        model.zero_grad()
        model(idx, labels=idx).loss.backward()

    return count(step)


def decode_step(residual: str) -> Counts:
    """Count the forward of one more token from a cache."""
    model, idx = tiny(residual)
    cache = Cache(model.config)
    with torch.no_grad():
        model.eval()(idx, cache=cache, last=1)
        return count(lambda: model(idx[:, :1], cache=cache))


def tiny(residual: str) -> tuple[GPT, torch.Tensor]:
    torch.manual_seed(0)
    return GPT(GPTConfig(residual=residual, **SIZES)), torch.randint(128, (BATCH, TIME))


def count(step: Callable[[], object]) -> Counts:
    """Return the counts of one step after some others."""
    for _ in range(WARM_UP):
        step()
    with profile(
        activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True
    ) as profiler:
        step()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "trace.json")
        profiler.export_chrome_trace(str(file))
        events = json.loads(file.read_text(encoding="utf-8"))["traceEvents"]
    calls = [event["name"] for event in events if event.get("cat") == "cpu_op"]
    memory = [event["args"]["Bytes"] for event in events if event["name"] == "[memory]"]
    return {
        "calls of ddl": sum(name.startswith("ddl::") for name in calls),
        "calls of torch": sum(name.startswith("aten::") for name in calls),
        "allocations": sum(size > 0 for size in memory),
    }


if __name__ == "__main__":
    print(json.dumps(all_steps()))
