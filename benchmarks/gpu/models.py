"""The models that a GPU trains: every residual on one backbone, held against plain PyTorch."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from baselines import plain
from common.candidates import Contestant, check_all, compiled, make, results
from ddl.config import GPTConfig, OptimConfig
from ddl.optim import make_optimizer

BF16 = torch.bfloat16
# Length of the difference of all gradients over their length: how far bfloat16 may lead from
# float32, or compiled from eager code. At the presets' sizes it is 0.02 additive, 0.055 ddl.
LARGEST_DRIFT = 0.15


@dataclass(frozen=True)
class Setting:
    """What is trained, and how."""

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
        """Of an element of the state, and of what sublayers take and give."""
        return {"state": 4 if self.precision == "autocast" else 2, "features": 2}

    def autocast(self, device: torch.device) -> AbstractContextManager[Any]:
        return torch.autocast(device.type, BF16, enabled=self.precision == "autocast")

    def tokens(self, batch: int, device: torch.device) -> Tensor:
        """Random tokens (batch, block_size)."""
        g = torch.Generator().manual_seed(0)
        shape = (batch, self.config.block_size)
        return torch.randint(self.config.vocab_size, shape, generator=g).to(device)


@contextmanager
def entered(setting: Setting, device: torch.device) -> Iterator[list[Contestant]]:
    """Models of all residuals, held against plain PyTorch and ready to be timed.

    In float32 every one has to agree with plain PyTorch, the additive one being that already; in
    bfloat16 its gradients may not lead far from those. They end with the block.
    """
    contestants = []
    try:
        for residual in setting.residuals:
            model = make(replace(setting.config, residual=residual), device)
            additive = residual == "additive"
            contestants.append(
                Contestant(
                    residual,
                    "plain" if additive else "fused",
                    setting.mode,
                    model,
                    oracle=model if additive else plain.peer(model),
                    optimizer=None,
                    hidden_size=setting.config.hidden_size,
                )
            )
        batch = setting.tokens(2, device)[:, : min(256, setting.config.block_size)]
        check_all(contestants, batch)
        for contestant in contestants:
            prepare(contestant, setting, batch)
        yield contestants
    finally:
        for contestant in contestants:
            contestant.model = contestant.oracle = nn.Module()
            contestant.optimizer = None
        torch._dynamo.reset()
        gc.collect()


def prepare(contestant: Contestant, setting: Setting, batch: Tensor) -> None:
    """Bring a model that passed into the precision and mode to be timed; compare once more."""
    if contestant.red is not None:
        return
    exact = results(contestant.oracle, batch)
    model = contestant.model
    if setting.precision == "bfloat16":
        model.bfloat16()
    check_drift(contestant, model, exact, batch, setting)
    contestant.oracle = model
    contestant.optimizer = make_optimizer(model, OptimConfig())
    if setting.mode == "compiled":
        contestant.model = compiled(model, setting.backend)


def check_drift(
    contestant: Contestant,
    model: nn.Module,
    expected: dict[str, Tensor],
    batch: Tensor,
    setting: Setting,
) -> None:
    """Turn a contestant red whose gradients lead too far from those expected."""
    with setting.autocast(batch.device):
        actual = results(model, batch)
    difference = length = 0.0
    for name in expected.keys() - {"logits", "loss"}:
        exact = expected[name].double()
        difference += (actual[name].double() - exact).square().sum().item()
        length += exact.square().sum().item()
    contestant.drift = (difference / length) ** 0.5
    if not contestant.drift <= LARGEST_DRIFT:
        contestant.red = (
            f"{contestant.name}: in bfloat16 its gradients are {contestant.drift:.2f} of their "
            f"length away from those expected, allowed {LARGEST_DRIFT}"
        )


def check_compiled(contestant: Contestant, setting: Setting, batch: Tensor) -> None:
    """Compiled code against eager code in the same precision."""
    with setting.autocast(batch.device):
        expected = results(contestant.oracle, batch)
    check_drift(contestant, contestant.model, expected, batch, setting)
