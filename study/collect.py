"""What the study's page needs of a finished run, as a record."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ddl import edit
from ddl.lab.analysis.inspection import inspect
from ddl.lab.analysis.runs import read_run
from ddl.lab.config import BASELINES
from ddl.lab.config.stored import plain
from ddl.lab.data import evaluation_batches
from ddl.lab.data import load as load_data
from ddl.lab.device import pick_device
from ddl.lab.load import load
from ddl.lab.train import checkpoint
from ddl.lab.train.runs import LAST, RunDirectory
from ddl.recording.sublayers import find_residuals

from .records import processor

TOKENS = 16_384  # that the rewrites of a finished model are measured on
OVER_TRAINING = ("beta", "error", "write_norm", "coherence")  # of recordings.jsonl
IN_THE_END = ("error", "error_after", "shrinks")  # means of the finished model
WINDOWS = 8  # of one pass


def collect(path: Path) -> dict[str, Any] | None:
    """The record of a run; None if it is not finished."""
    run = read_run(path, path.name)
    if not run.finished:
        return None
    directory = RunDirectory(path)
    found = directory.find_checkpoint(LAST)
    assert found is not None
    record: dict[str, Any] = {
        "name": path.name,
        "processor": processor(pick_device(run.options.device, run.options.model.residual)),
        "config": plain(run.options),
        "versions": checkpoint.read_manifest(found).versions,
        "data": run.data,
        "parameters": run.parameters,
        "tokens_per_second": run.tokens_per_second,
        "peak_memory": run.peak_memory,
        "loss": run.final.loss if run.final else None,
        "bits_per_byte": run.bits_per_byte,
        "validation": [
            [r["step"], r["validation_loss"]] for r in run.records if "validation_loss" in r
        ],
    }
    recordings = directory.recordings.read()
    if recordings and run.options.model.residual not in BASELINES:  # which have no rewrites
        record |= {"training": [_short(each) for each in recordings], "depth": _depth(path, run)}
    return record


def _short(recording: dict[str, Any]) -> dict[str, Any]:
    """The means over tokens of a recording, per sublayer."""
    means = {
        name: [_rounded(sublayer[name]["mean"]) for sublayer in recording["sublayers"]]
        for name in OVER_TRAINING
    }
    return {"step": recording["step"], **means}


def _depth(path: Path, run: Any) -> dict[str, Any]:
    """The rewrites of the finished model over depth."""
    model, _ = load(path, run.options.device)
    block = model.config.block_size
    corpus = load_data(run.options.data)
    count = TOKENS // block // WINDOWS
    device = next(model.parameters()).device
    windows = [
        each.tokens.to(device)
        for each in evaluation_batches(corpus.validation, WINDOWS, block, count)
    ]
    summary = inspect(model, windows).summary()
    kept = ("coherence", "effective_rank", "singular_values", "survival", "shares")
    sublayers = summary["sublayers"]
    return {
        **{name: _rounded(summary[name]) for name in kept},
        "eigenvalue_counts": [each["eigenvalue_counts"] for each in sublayers],
        "beta": [_rounded([s["beta"]["mean"], s["beta"]["std"]]) for s in sublayers],
        **{name: [_rounded(each[name]["mean"]) for each in sublayers] for name in IN_THE_END},
        "without_erasing": _without_erasing(model, windows),
    }


@torch.inference_mode()
def _without_erasing(model: Any, windows: list[Tensor]) -> list[float] | None:
    """The loss as it is, then with one sublayer after the other that erases nothing, and last with
    none that does. None of a model that never erases."""
    residuals = find_residuals(model)
    if any(residual.erase == "none" for residual in residuals.values()):
        return None

    def loss() -> float:
        return sum(float(model(idx, labels=idx).loss) for idx in windows) / len(windows)

    losses = [loss()]
    for sublayers in (*residuals, None):
        with edit(model, sublayers=sublayers, erase="none"):
            losses.append(loss())
    return losses


def _rounded(values: Any) -> Any:
    """Numbers to five digits: enough for a picture."""
    if isinstance(values, list):
        return [_rounded(value) for value in values]
    return None if values is None else float(f"{values:.5g}")
