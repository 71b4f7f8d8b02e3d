"""Trainer: AdamW, warm-up and cosine decay, clipping, accumulation, autocast, evaluation."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ddl import cuda, data, environment
from ddl.config import TrainConfig
from ddl.errors import InputError
from ddl.models import GPT
from ddl.optim import learning_rate, make_optimizer
from ddl.recording import Recording, record

PROMPT, SAMPLE = 16, 200  # tokens of a sample of text


class Step(NamedTuple):
    """Mean loss and gradient norm of one optimizer step: scalar tensors, still on the device."""

    loss: Tensor
    grad_norm: Tensor


class Trainer:
    """A model, its optimizer and its batches.

    Trainers with equal seeds see the same batches and start from the same backbone, for every
    residual. Repeating a run on the same machine gives the same losses; on a GPU only with
    `config.deterministic`.

    steps_done: optimizer steps so far. loss_sum, summed: the losses of the steps since `mean_loss`
    was last called, and their number.
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
        self.steps_done = self.summed = 0
        self.loss_sum = torch.zeros((), dtype=torch.float64, device=device)

    @property
    def tokens_per_step(self) -> int:
        """Training tokens of one optimizer step, over all accumulated batches."""
        return self.config.batch_size * self.config.accumulation * self.config.model.block_size

    def step(self) -> Step:
        """Accumulate the gradients of `accumulation` batches and update the weights once."""
        config = self.config
        lr = learning_rate(config.optim, self.steps_done, config.steps)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        total = torch.zeros((), device=self.device)
        whole = config.batch_size * (config.model.block_size - 1) * config.accumulation
        predicted = 0  # tokens; `whole` if no window has several documents
        for part in range(config.accumulation):
            windows = self._batch(part)
            if windows.predicted:
                loss = self._loss(windows, self.forward) / (whole / windows.predicted)
                loss.backward()
                total += loss.detach()
                predicted += windows.predicted
        if not predicted:
            raise _nothing_to_predict(f"a batch of step {self.steps_done + 1}")
        if predicted < whole:  # each token counts the same, as in one large batch
            total *= whole / predicted
            for parameter in self.model.parameters():
                if parameter.grad is not None:
                    parameter.grad.mul_(whole / predicted)
        largest = config.optim.clip or math.inf
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), largest)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.steps_done += 1
        self.loss_sum += total
        self.summed += 1
        return Step(total, norm)

    def _batch(self, part: int) -> data.Windows:
        """The windows of one forward pass of the next step."""
        config = self.config
        return data.batch(
            self.corpus.train,
            config.batch_size,
            config.model.block_size,
            seed=config.seed,
            step=self.steps_done,
            first=part * config.batch_size,
            documents=config.separate_documents,
        )

    def mean_loss(self) -> float:
        """Mean loss of the steps since the last call; on a GPU it waits for them."""
        loss = float(self.loss_sum) / self.summed
        self.loss_sum.zero_()
        self.summed = 0
        return loss

    @torch.no_grad()
    def evaluate(self, stopped: Callable[[], bool] = lambda: False) -> float | None:
        """Mean validation loss in nats per predicted token, on the same windows at every call.

        It takes `config.eval_batches` batches, or all of them if that is 0. Returns None if
        `stopped()` is true before the end.
        """
        config, total = self.config, torch.zeros((), device=self.device)
        size, block = config.batch_size, config.model.block_size
        apart, count = config.separate_documents, 0.0
        self.model.eval()
        try:
            for windows in data.evaluation_batches(
                self.corpus.validation, size, block, config.eval_batches, documents=apart
            ):
                if stopped():
                    return None
                if windows.predicted:
                    weight = windows.predicted / (block - 1)  # in windows of a single document
                    total += self._loss(windows, self.forward) * weight
                    count += weight
        finally:
            self.model.train()
        if not count:
            raise _nothing_to_predict("the validation windows")
        return float(total) / count

    @torch.no_grad()
    def record(self) -> Recording | None:
        """What the rewrites do on the first evaluation windows; None without rewrites."""
        config = self.config
        if config.model.residual == "additive":
            return None
        (windows,) = data.evaluation_batches(
            self.corpus.validation,
            config.batch_size,
            config.model.block_size,
            1,
            documents=config.separate_documents,
        )
        self.model.eval()
        try:
            with record(self.model) as recording:
                self._loss(windows, self.model)
        finally:
            self.model.train()
        return recording

    def sample(self) -> str:
        """Text that the model writes after the first tokens of the validation part.

        It draws from a generator of its own, so training goes on as without it.
        """
        block = self.config.model.block_size
        prompt = self.corpus.validation[: min(PROMPT, block // 2)].tolist()
        generator = torch.Generator().manual_seed(self.config.seed)
        options: dict[str, Any] = {"temperature": 0.8, "top_k": 40, "generator": generator}
        self.model.eval()
        try:
            idx = torch.tensor([prompt], device=self.device)
            written = self.model.generate(idx, min(SAMPLE, block - len(prompt)), **options)
        finally:
            self.model.train()
        return self.corpus.tokenizer.decode(written[0].tolist())

    def _loss(self, windows: data.Windows, model: Callable[..., Any]) -> Tensor:
        idx, document_starts = (self._to_device(tensor) for tensor in windows)
        assert idx is not None
        mixed = self.config.precision == "bfloat16"
        with torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=mixed):
            loss = model(idx, labels=idx, document_starts=document_starts).loss
        assert isinstance(loss, Tensor)
        return loss

    def _to_device(self, tensor: Tensor | None) -> Tensor | None:
        if tensor is None or self.device.type != "cuda":
            return tensor
        return tensor.pin_memory().to(self.device, non_blocking=True)


def _nothing_to_predict(where: str) -> InputError:
    return InputError(
        f"`separate_documents` must leave tokens to predict, got {where} in which every document"
        " is one token"
    )


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
