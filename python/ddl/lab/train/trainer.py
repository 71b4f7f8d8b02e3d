"""Trainer: AdamW, warm-up and cosine decay, clipping, accumulation, autocast, evaluation."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ddl.errors import InputError
from ddl.lab import data
from ddl.lab.config import TrainConfig
from ddl.models import GPT
from ddl.optim import learning_rate, make_optimizer, set_learning_rate
from ddl.recording import Recording, record

from .device import make_repeatable
from .initial import Weights
from .parallel import accumulating, is_sharded, spread, whole
from .processes import ALONE, Processes

PROMPT, SAMPLE = 16, 200  # tokens of a sample of text


class Flags(NamedTuple):
    """Signals that a process sends with its next step.

    stop: a stop is requested. broken: it has an error. late: it is time for a checkpoint.
    """

    stop: bool = False
    broken: bool = False
    late: bool = False


class Step(NamedTuple):
    """Mean loss and gradient norm of one optimizer step: scalar tensors, still on the device.

    flags: how many processes have set each of their Flags; None for a single process.
    """

    loss: Tensor
    grad_norm: Tensor
    flags: Tensor | None = None


class Trainer:
    """A model, its optimizer and its batches.

    Trainers with equal seeds see the same batches and start from the same backbone, for every
    residual. Repeating a run on the same machine gives the same losses; on a GPU only with
    `config.deterministic`.

    processes: those that share every batch; each has its part of it, and they all call the same
    methods. initial: the weights to start from; None for random ones.

    steps_done: optimizer steps so far. loss_sum, summed: the losses of the steps since `mean_loss`
    was last called, and their number.
    """

    def __init__(
        self,
        config: TrainConfig,
        corpus: data.Corpus,
        device: torch.device,
        processes: Processes = ALONE,
        initial: Weights | None = None,
    ) -> None:
        corpus.check(config.model.block_size, config.model.vocab_size)
        _check_share(config, processes)
        self.config, self.corpus, self.device = config, corpus, device
        self.processes = processes
        if config.deterministic:
            make_repeatable(device)
        torch.manual_seed(config.seed)
        self.model = GPT(config.model)
        if initial is not None:
            self.model.load_state_dict(initial)
        self.forward = spread(self.model, config, device, processes)
        self.sharded = is_sharded(config, processes)
        self.optimizer = make_optimizer(self.model, config.optim)
        self.steps_done = self.summed = 0
        self.loss_sum = torch.zeros((), dtype=torch.float64, device=device)
        if not (processes.alone or self.sharded):
            self._settle()

    def _settle(self) -> None:
        """Run a backward pass for nothing but the order in which DDP sums gradients from now on.

        It takes the order in which the first pass makes them. Another order rounds in another way,
        so without this a resumed run would not be the uninterrupted one, bit for bit.
        """
        first, size = self._parts()[0]
        self._loss(self._batch(first, size), self.forward).backward()
        self.optimizer.zero_grad(set_to_none=True)

    def step(self, flags: Callable[[], Flags] = Flags) -> Step:
        """Accumulate the gradients of `accumulation` batches and update the weights once.

        flags: what this process tells the others, called when the step is done.
        """
        config = self.config
        lr = learning_rate(config.optim, self.steps_done, config.steps)
        set_learning_rate(self.optimizer, lr)
        total = self._accumulate()
        largest = config.optim.clip or math.inf
        norm = whole(torch.nn.utils.clip_grad_norm_(self.model.parameters(), largest))
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.steps_done += 1
        set_by = None
        if not self.processes.alone:
            message = torch.tensor(flags(), dtype=torch.float32, device=self.device)
            mean = (total / self.processes.count).unsqueeze(0)
            sums = self.processes.sum(torch.cat((mean, message)))
            total, set_by = sums[0], sums[1:]
        self.loss_sum += total
        self.summed += 1
        return Step(total, norm, set_by)

    def _accumulate(self) -> Tensor:
        """Accumulate the gradients of a step; return this process's part of the loss, times n.

        The mean over the n processes is taken where losses and gradients are summed.
        """
        config, count = self.config, self.processes.count
        total = torch.zeros((), device=self.device)
        most = config.batch_size * (config.model.block_size - 1) * config.accumulation
        predicted = 0  # tokens; `most` over all processes if no window has several documents
        parts = self._parts()
        for first, size in parts:
            windows = self._batch(first, size)
            predicted += windows.predicted
            if windows.predicted or count > 1:  # the others wait for this one in the backward pass
                with accumulating(self.forward, last=(first, size) == parts[-1]):
                    loss = self._loss(windows, self.forward)
                    loss = loss / (most / (count * max(windows.predicted, 1)))
                    loss.backward()
                total += loss.detach()
        if config.separate_documents:
            predicted = int(self.processes.sum(torch.tensor(predicted)))
            self._require_predicted(predicted, f"a batch of step {self.steps_done + 1}")
            if predicted < most:  # each token counts the same, as in one large batch
                total *= most / predicted
                for parameter in self.model.parameters():
                    if parameter.grad is not None:
                        parameter.grad.mul_(most / predicted)
        return total

    def _parts(self) -> list[tuple[int, int]]:
        """This process's forward passes in a step: the number of the first window, and how many."""
        size = self.config.batch_size
        share = size * self.config.accumulation // self.processes.count
        start = self.processes.rank * share
        return [(start + done, min(size, share - done)) for done in range(0, share, size)]

    def _batch(self, first: int, size: int) -> data.Windows:
        """The windows from number `first` on of the next step."""
        config = self.config
        return data.batch(
            self.corpus.train,
            size,
            config.model.block_size,
            seed=config.seed,
            step=self.steps_done,
            first=first,
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
        processes, count = self.processes, 0.0
        self.model.eval()
        try:
            for windows in data.evaluation_batches(
                self.corpus.validation,
                size,
                block,
                config.eval_batches,
                documents=config.separate_documents,
                share=(processes.rank, processes.count),
            ):
                if processes.any(stopped()):
                    return None
                if windows.predicted or not processes.alone:
                    weight = windows.predicted / (block - 1)  # in windows of a single document
                    total += self._loss(windows, self.forward) * weight
                    count += weight
        finally:
            self.model.train()
        mean = processes.sum(torch.tensor([total, count], dtype=torch.float64))
        self._require_predicted(float(mean[1]), "the validation windows")
        return float(mean[0]) / float(mean[1])

    @torch.no_grad()
    def record(self) -> Recording:
        """Statistics of the rewrites, or of what sublayers add, on the first evaluation windows."""
        config = self.config
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
        options["vocabulary"] = self.corpus.tokenizer.vocab_size
        self.model.eval()
        try:
            idx = torch.tensor([prompt], device=self.device)
            written = self.model.generate(idx, min(SAMPLE, block - len(prompt)), **options)
        finally:
            self.model.train()
        with self.processes.together():
            return self.corpus.tokenizer.decode(written[0].tolist())

    def _loss(self, windows: data.Windows, model: Callable[..., Any]) -> Tensor:
        idx, document_starts = (self._to_device(tensor) for tensor in windows)
        assert idx is not None
        mixed = self.config.precision == "bfloat16"
        with torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=mixed):
            if not windows.predicted:  # other processes need this one's forward pass
                return 0 * model(idx, document_starts=document_starts).logits.float().sum()
            loss = model(idx, labels=idx, document_starts=document_starts).loss
        assert isinstance(loss, Tensor)
        return loss

    def _require_predicted(self, predicted: float, where: str) -> None:
        """Raise InputError if no token is predicted, a number that all processes have."""
        if predicted:
            return
        with self.processes.together():
            raise InputError(
                "separate_documents",
                "leave tokens to predict",
                f"{where} in which every document is one token",
            )

    def _to_device(self, tensor: Tensor | None) -> Tensor | None:
        if tensor is None or self.device.type != "cuda":
            return tensor
        return tensor.pin_memory().to(self.device, non_blocking=True)


def _check_share(config: TrainConfig, processes: Processes) -> None:
    windows = config.batch_size * config.accumulation
    if windows % processes.count:
        raise InputError(
            "accumulation",
            (
                f"be such that {processes.count} processes have equal parts of a step's"
                " batch_size × accumulation sequences"
            ),
            f"{config.batch_size} × {config.accumulation}",
        )
