"""nanoGPT's train.py with DDP: a converted model in two processes is the one of one process."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ddl.nanogpt import convert
from tests.support.helpers import assert_same_gradients, randomise_
from tests.support.nanogpt_cases import F64, VARIANTS, make, tokens
from tests.support.nanogpt_standin import GPT
from tests.support.processes import together

F32, BF16 = torch.float32, torch.bfloat16
COUNT, ACCUMULATED = 2, 4  # processes, batches of a step over all of them
ANNEALED = {**VARIANTS["cc"], "start": "additive", "anneal_steps": 5}
OPTIONS = {"cc": VARIANTS["cc"], "tc": VARIANTS["tc"], "annealed": ANNEALED}
Micro = Callable[[int], range]  # process → the batches of a step that it has


def share(rank: int) -> range:
    return range(rank, ACCUMULATED, COUNT)


def train(
    options: dict[str, Any], steps: int, micro: range, wrap: bool, dtype: torch.dtype = F64
) -> tuple[GPT, dict[str, Tensor]]:
    """The model after nanoGPT's loop, and the gradients of its last step.

    micro: the numbers of the batches of a step that this process has. wrap: with DDP, whose
    gradients are summed in the last of them only, as train.py does it. dtype: bfloat16 by autocast.
    """
    raw_model = convert(make(F64 if dtype == F64 else F32), **options)
    randomise_(raw_model, std=0.3)
    optimizer = raw_model.configure_optimizers(0.1, 1e-3, (0.9, 0.95), "cpu")
    model: nn.Module = DistributedDataParallel(raw_model) if wrap else raw_model
    gradients = {}
    for step in range(steps):
        for micro_step, number in enumerate(micro):
            if wrap:
                model.require_backward_grad_sync = micro_step == len(micro) - 1
            with torch.autocast("cpu", dtype=BF16, enabled=dtype == BF16):
                _, loss = model(*tokens(seed=100 * step + number))
            (loss / len(micro)).backward()
        gradients = {name: p.grad.clone() for name, p in raw_model.named_parameters()}
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return raw_model, gradients


def in_processes(
    folder: Path,
    options: dict[str, Any],
    steps: int,
    micro: Micro = share,
    dtype: torch.dtype = F64,
) -> list[dict[str, Any]]:
    """Each process saves at the end its gradients, and its checkpoint, as train.py's."""

    def act(rank: int) -> None:
        torch.distributed.init_process_group("gloo")
        model, gradients = train(options, steps, micro(rank), wrap=True, dtype=dtype)
        saved = {"gradients": gradients, "model": model.state_dict(), "delta_args": options}
        torch.save(saved, folder / f"{rank}.pt")

    together(COUNT, folder, act)
    return [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in range(COUNT)]


@pytest.mark.parametrize("dtype", [F64, BF16], ids=str)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_gradients_are_those_of_one_process(
    options: dict[str, Any], dtype: torch.dtype, tmp_path: Path
) -> None:
    """Under autocast, too, as it casts the same parameters for the same batches."""
    steps = 2 if "start" in options else 1  # the first step's gradients of gates are zero
    found = in_processes(tmp_path, options, steps, dtype=dtype)
    _, expected = train(options, steps, range(ACCUMULATED), wrap=False, dtype=dtype)
    for process in found:
        assert_same_gradients(process["gradients"], expected, F64 if dtype == F64 else F32, depth=8)


def test_a_process_with_other_batches_is_noticed(tmp_path: Path) -> None:
    found = in_processes(tmp_path, VARIANTS["cc"], 1, micro=lambda rank: share(0))
    _, expected = train(VARIANTS["cc"], 1, range(ACCUMULATED), wrap=False)
    with pytest.raises(AssertionError, match=r"^gradient of \S+: max error"):
        assert_same_gradients(found[1]["gradients"], expected, F64, depth=8)


def test_processes_anneal_together_and_one_goes_on(tmp_path: Path) -> None:
    """Both count the same steps; the first one's checkpoint is the model of a single process."""
    first, second = in_processes(tmp_path, ANNEALED, 3)
    for name, tensor in first["model"].items():
        assert torch.equal(tensor, second["model"][name]), name
    assert first["model"]["transformer.h.0.anneal.step"] == 3

    loaded = convert(make(F64), **first["delta_args"])
    loaded.load_state_dict(first["model"])
    alone, _ = train(ANNEALED, 3, range(ACCUMULATED), wrap=False)
    idx, targets = tokens(seed=7)
    torch.testing.assert_close(loaded(idx, targets)[1], alone(idx, targets)[1])
    assert loaded.transformer.h[0].anneal.share(F64) == 3 / 5
