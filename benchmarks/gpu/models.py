"""The models that are trained on a GPU: every residual on one backbone, and their checks."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from common.candidates import Candidate, check_all, compiled
from ddl.lab.bench import agreement, plain
from ddl.lab.bench.agreement import TOLERANCE, make, results
from ddl.lab.bench.measure import MismatchError
from ddl.lab.config import GPTConfig, OptimConfig
from ddl.optim import make_optimizer

BF16 = torch.bfloat16


@dataclass(frozen=True)
class Setting:
    """The models to train, their precision and their mode."""

    preset: str
    config: GPTConfig  # of the backbone
    residuals: tuple[str, ...]  # additive first
    precision: str  # "autocast": bfloat16 over float32 parameters; "bfloat16": all of it
    mode: str  # "eager" or "compiled"
    batch: int  # sequences of block_size tokens: the most to try
    backend: str = "inductor"

    @property
    def name(self) -> str:
        return f"{self.preset} {self.precision} {self.mode}"

    @property
    def bytes(self) -> dict[str, int]:
        """Bytes of an element of the state, and of a sublayer's inputs and outputs (features)."""
        return {"state": 4 if self.precision == "autocast" else 2, "features": 2}

    def autocast(self, device: torch.device) -> AbstractContextManager[Any]:
        return torch.autocast(device.type, BF16, enabled=self.precision == "autocast")

    def tokens(self, batch: int, device: torch.device) -> Tensor:
        """Random tokens (batch, block_size)."""
        g = torch.Generator().manual_seed(0)
        shape = (batch, self.config.block_size)
        return torch.randint(self.config.vocab_size, shape, generator=g).to(device)


@contextmanager
def checked_candidates(
    setting: Setting, device: torch.device, *, cached: bool = False
) -> Iterator[list[Candidate]]:
    """Models of all residuals, compared with plain PyTorch and ready to be timed.

    In float32 every model must agree with plain PyTorch (the additive one is its own oracle); in
    bfloat16 its gradients must stay near those. cached: in float32 a step with a cache must also
    give the logits of the whole sequence. At the end of the block the models are freed.
    """
    candidates = []
    try:
        for residual in setting.residuals:
            model = make(replace(setting.config, residual=residual), device)
            additive = residual == "additive"
            candidates.append(
                Candidate(
                    residual,
                    "plain" if additive else "fused",
                    setting.mode,
                    model,
                    oracle=model if additive else plain.peer(model),
                    hidden_size=setting.config.hidden_size,
                )
            )
        batch = setting.tokens(2, device)[:, : min(256, setting.config.block_size)]
        check_all(candidates, batch)
        for candidate in candidates:
            if cached:
                check_cache(candidate, batch)
            prepare(candidate, setting, batch)
        yield candidates
    finally:
        for candidate in candidates:
            candidate.model = candidate.oracle = nn.Module()
            candidate.optimizer = None
        torch._dynamo.reset()
        gc.collect()


def prepare(candidate: Candidate, setting: Setting, batch: Tensor) -> None:
    """Convert a model that passed to the timed precision and mode, and check its drift."""
    if candidate.red is not None:
        return
    exact = results(candidate.oracle, batch)
    model = candidate.model
    if setting.precision == "bfloat16":
        model.bfloat16()
    check_drift(candidate, model, exact, batch, setting)
    candidate.oracle = model
    candidate.optimizer = make_optimizer(model, OptimConfig())
    if setting.mode == "compiled":
        candidate.model = compiled(model, setting.backend)


def check_cache(candidate: Candidate, batch: Tensor) -> None:
    """Mark a candidate red if the logits of a cached step are not those of the whole sequence."""
    try:
        agreement.check_cache(candidate.model, batch, TOLERANCE)
    except MismatchError as difference:
        candidate.red = candidate.red or f"{candidate.name}: {difference}"


def check_drift(
    candidate: Candidate,
    model: nn.Module,
    expected: dict[str, Tensor],
    batch: Tensor,
    setting: Setting,
) -> None:
    """Mark a candidate red if its gradients are too far from those expected."""
    with setting.autocast(batch.device):
        actual = results(model, batch)
    candidate.drift = agreement.drift(actual, expected)
    try:
        agreement.check_drift(candidate.drift)
    except MismatchError as difference:
        candidate.red = f"{candidate.name}: {difference}"


def check_compiled(candidate: Candidate, setting: Setting, batch: Tensor) -> None:
    """Compare compiled code with eager code in the same precision."""
    with setting.autocast(batch.device):
        expected = results(candidate.oracle, batch)
    check_drift(candidate, candidate.model, expected, batch, setting)
