"""AnnealCallback: the Trainer's steps bring a converted decoder from additions to rewrites."""

from __future__ import annotations

from typing import Any

from torch import nn
from transformers import TrainerCallback

from ddl.nanogpt.annealing import Annealing, anneal
from ddl.recording.sublayers import unwrapped

__all__ = ["AnnealCallback"]


class AnnealCallback(TrainerCallback):
    """Count the Trainer's optimizer steps for a model of `ddl.hf.convert(…, start="additive")`.

        Trainer(model, …, callbacks=[ddl.hf.AnnealCallback()])

    A model that is not annealed, such as an adapter, is left alone. Printed logs get `rewrites`,
    the share a of the rewrites; trackers get theirs before.
    """

    def on_train_begin(
        self,
        args: Any,
        state: Any,
        control: Any,
        model: Any = None,
        optimizer: Any = None,
        **_: Any,
    ) -> None:
        """Let each step of the optimizer count."""
        if _annealings(model):
            anneal(model, getattr(optimizer, "optimizer", optimizer))  # below accelerate's wrapper

    def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Add the share of the rewrites."""
        logs = kwargs["logs"]
        for annealing in _annealings(kwargs["model"]):
            logs["rewrites"] = min(1.0, int(annealing.step) / annealing.steps)


def _annealings(model: nn.Module) -> list[Annealing]:
    return [module for module in unwrapped(model).modules() if isinstance(module, Annealing)]
