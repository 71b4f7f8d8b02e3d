"""CUDA graphs of training steps and validation: of models this small a GPU waits for Python.

`install()` gives them to every `Trainer` that they suit. They do what its own steps do: the loss of
a batch, gradients, clipping, AdamW; but the optimizer's learning rate and step are on the GPU.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ddl.lab.data import Windows
from ddl.lab.train import Trainer
from ddl.lab.train.trainer import Flags, Step
from ddl.optim import learning_rate, set_learning_rate

WARM_UP = 3  # calls before the capture, as torch.cuda.graph asks for


class Graphed:
    """Work on batches of tokens of the first one's shape; others are worked on without a graph.

    The results are copies.
    """

    def __init__(self, work: Callable[[Tensor], tuple[Tensor, ...]], device: torch.device) -> None:
        self.work, self.device = work, device
        self.tokens: Tensor | None = None
        self.found: tuple[Tensor, ...] = ()
        self.graph: torch.cuda.CUDAGraph | None = None
        self.done = 0

    def __call__(self, tokens: Tensor) -> tuple[Tensor, ...]:
        if self.tokens is None:
            self.tokens = torch.empty_like(tokens, device=self.device)
        if tokens.shape != self.tokens.shape:
            return self.work(tokens.to(self.device))
        self.tokens.copy_(tokens)
        if self.done < WARM_UP:
            aside = torch.cuda.Stream()
            aside.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(aside):
                self.found = self.work(self.tokens)
            torch.cuda.current_stream().wait_stream(aside)
        else:
            if self.graph is None:
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph):
                    self.found = self.work(self.tokens)
                self.graph = graph
            self.graph.replay()
        self.done += 1
        return tuple(x.clone() for x in self.found)


class GraphedStep:
    """A training step. loss_of: of a batch of tokens on the GPU."""

    def __init__(
        self, optimizer: torch.optim.AdamW, loss_of: Callable[[Tensor], Tensor], clip: float
    ) -> None:
        self.optimizer, self.loss_of, self.clip = optimizer, loss_of, clip
        self.parameters = [p for group in optimizer.param_groups for p in group["params"]]
        for group in optimizer.param_groups:
            group["capturable"] = True
        device = self.parameters[0].device
        self.rates = [torch.zeros((), device=device) for _ in optimizer.param_groups]
        self.graphed = Graphed(self._work, device)

    def __call__(self, tokens: Tensor, lr: float) -> tuple[Tensor, Tensor]:
        """Take a step on a batch of tokens. Returns the loss and the norm of the gradients."""
        set_learning_rate(self.optimizer, lr)
        for rate, group in zip(self.rates, self.optimizer.param_groups, strict=True):
            rate.fill_(group["lr"])
        loss, norm = self.graphed(tokens)
        set_learning_rate(self.optimizer, lr)  # for who saves or shows it
        return loss, norm

    def _work(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        for rate, group in zip(self.rates, self.optimizer.param_groups, strict=True):
            group["lr"] = rate
        self.optimizer.zero_grad(set_to_none=True)  # a graph then has gradients of its own
        loss = self.loss_of(tokens)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(self.parameters, self.clip)
        self.optimizer.step()
        return loss.detach(), norm


def step(trainer: Trainer) -> Step:
    """`Trainer.step` as a graph, of a process that has no others to tell its flags."""
    config, given = trainer.config, vars(trainer)
    if "graphed_step" not in given:

        def loss_of(tokens: Tensor) -> Tensor:
            return trainer.forward(tokens, labels=tokens).loss

        most = config.optim.clip or math.inf
        given["graphed_step"] = GraphedStep(trainer.optimizer, loss_of, most)
    lr = learning_rate(config.optim, trainer.steps_done, config.steps)
    first, size = trainer._parts()[0]
    loss, norm = given["graphed_step"](trainer._batch(first, size).tokens, lr)
    trainer.steps_done += 1
    trainer.loss_sum += loss
    trainer.summed += 1
    return Step(loss, norm)


def validation_loss(trainer: Trainer, windows: Windows, model: Any) -> Tensor:
    """`Trainer._loss` without gradients as a graph."""
    given = vars(trainer)
    if "graphed_loss" not in given:

        def work(tokens: Tensor) -> tuple[Tensor]:
            return (model(tokens, labels=tokens).loss,)

        given["graphed_loss"] = Graphed(work, trainer.device)
    return given["graphed_loss"](windows.tokens)[0]


def suits(trainer: Trainer) -> bool:
    """Whether a trainer's steps are one forward pass in float32, of whole windows, on a GPU."""
    config = trainer.config
    whole = config.accumulation == 1 and not config.separate_documents and trainer.processes.alone
    return trainer.device.type == "cuda" and config.precision == "float32" and whole


def is_watched(model: nn.Module) -> bool:
    """Whether a recording sees what the model does, which no graph shows."""
    return any(getattr(module, "hooks", ()) for module in model.modules())


def install() -> None:
    """Make trainers that they suit use graphs."""
    own_step, own_loss = Trainer.step, Trainer._loss

    def chosen_step(self: Trainer, flags: Callable[[], Flags] = Flags) -> Step:
        return step(self) if suits(self) else own_step(self, flags)

    def chosen_loss(self: Trainer, windows: Windows, model: Any) -> Tensor:
        if suits(self) and not torch.is_grad_enabled() and not is_watched(self.model):
            return validation_loss(self, windows, model)
        return own_loss(self, windows, model)

    Trainer.step, Trainer._loss = chosen_step, chosen_loss  # type: ignore[method-assign]
