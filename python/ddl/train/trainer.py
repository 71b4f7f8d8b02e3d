"""Trainer: AdamW, warm-up and cosine decay, clipping, accumulation, autocast, evaluation."""

from __future__ import annotations

import math
import warnings
from typing import NamedTuple

import torch
from torch import Tensor

from ddl import cuda, data, environment
from ddl.config import TrainConfig
from ddl.errors import InputError
from ddl.models import GPT
from ddl.optim import learning_rate, make_optimizer


class Step(NamedTuple):
    """Mean loss and gradient norm of one optimizer step: scalar tensors, still on the device."""

    loss: Tensor
    grad_norm: Tensor


class Trainer:
    """A model, its optimizer and its batches.

    Trainers with equal seeds see the same batches and start from the same backbone, for every
    residual. Repeating a run on the same machine gives the same losses; on a GPU only with
    `config.deterministic`.
    """

    def __init__(self, config: TrainConfig, corpus: data.Corpus, device: torch.device) -> None:
        corpus.check(config.model.block_size, config.model.vocab_size)
        self.config, self.corpus, self.device = config, corpus, device
        if config.deterministic:
            make_repeatable(device)
        torch.manual_seed(config.seed)
        self.model = GPT(config.model).to(device)
        self.forward = torch.compile(self.model) if config.compile else self.model
        self.optimizer = make_optimizer(self.model, config.optim)
        self.generator = torch.Generator().manual_seed(config.seed)
        self.steps_done = 0

    @property
    def tokens_per_step(self) -> int:
        return self.config.batch_size * self.config.accumulation * self.config.model.block_size

    def step(self) -> Step:
        """Accumulate the gradients of `accumulation` batches and update the weights once."""
        config = self.config
        lr = learning_rate(config.optim, self.steps_done, config.steps)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        total = torch.zeros((), device=self.device)
        for _ in range(config.accumulation):
            idx = data.batch(
                self.corpus.train, config.batch_size, config.model.block_size, self.generator
            )
            loss = self._loss(idx) / config.accumulation
            loss.backward()
            total += loss.detach()
        largest = config.optim.clip or math.inf
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), largest)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.steps_done += 1
        return Step(total, norm)

    @torch.no_grad()
    def evaluate(self, batches: int | None = None) -> float:
        """Mean validation loss in nats per token, on the same windows at every call.

        batches: number of batches, by default `config.eval_batches`; 0 takes all.
        """
        count = self.config.eval_batches if batches is None else batches
        size, block = self.config.batch_size, self.config.model.block_size
        self.model.eval()
        windows, total = 0, torch.zeros((), device=self.device)
        for idx in data.evaluation_batches(self.corpus.validation, size, block, count):
            total += self._loss(idx) * len(idx)
            windows += len(idx)
        self.model.train()
        return float(total) / windows

    def _loss(self, idx: Tensor) -> Tensor:
        largest = int(idx.max())
        if largest >= self.config.model.vocab_size:  # on a GPU it would abort the process
            raise InputError(
                f"{self.corpus.name} must hold tokens below `vocab_size`"
                f" = {self.config.model.vocab_size}, got {largest}"
            )
        if self.device.type == "cuda":
            idx = idx.pin_memory().to(self.device, non_blocking=True)
        half = self.config.precision == "bfloat16"
        with torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=half):
            loss = self.forward(idx, labels=idx).loss
        assert isinstance(loss, Tensor)
        return loss


def pick_device(name: str, residual: str) -> torch.device:
    """Return the device for "auto", "cpu" or "cuda".

    "auto" is the GPU if there is one that can run the residual's operators, else the CPU, with a
    warning if torch could use a GPU. Raises InputError for "cuda" if there is no such GPU.
    """
    reason = None
    if name != "cpu":  # for "cpu", do not even look for the driver
        reason = _why_no_gpu(residual)
    if name == "cuda" and reason:
        raise InputError(f"`device` must be cpu, because {reason}, got 'cuda'")
    if reason and torch.cuda.is_available():
        warnings.warn(f"`device` auto takes the CPU, because {reason}", stacklevel=2)
    return torch.device("cpu" if name == "cpu" or reason else "cuda")


def _why_no_gpu(residual: str) -> str | None:
    if not torch.cuda.is_available():
        return "torch finds no GPU"
    # The additive baseline uses torch alone, so it runs on GPUs that our kernels do not support.
    return None if residual == "additive" else cuda.why_unavailable()


def make_repeatable(device: torch.device) -> None:
    """On a GPU, make torch use deterministic algorithms; on a CPU they are deterministic anyway."""
    if device.type == "cuda":
        environment.make_cublas_repeatable()
        torch.use_deterministic_algorithms(True, warn_only=True)
        # The mode fills new tensors as a debugging aid, which costs a pass over each of them.
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
