"""Figures of a run beside its loss: perplexity, bits per byte, utilisation, memory."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Iterable
from functools import cache
from typing import Any, NamedTuple

import torch

from ddl.lab.data.corpus import Tokens, batch_places, evaluation_places
from ddl.lab.data.spelling import spelling
from ddl.lab.machine import peak_bytes
from ddl.models import flops_per_token

from .json_lines import perplexity
from .trainer import Trainer

# Names of the figures that are measured: they differ between a run and its repetition.
MEASURED = ("tokens_per_second", "mfu", "peak_memory", "seconds")

SIDE, TRIES = 1024, 5  # the peak of a CPU is the best of 5 products of 1024 × 1024 matrices


class Peak(NamedTuple):
    """Dense matrix products per second, in 1e12 operations."""

    bfloat16: float
    float32: float


# NVIDIA's data sheets: dense, without sparsity, float32 without TF32. The first name that is found
# counts.
GPUS = {
    "H100 PCIe": Peak(756, 51),
    "H100 NVL": Peak(835, 60),
    "H100": Peak(989, 67),
    "H200 NVL": Peak(835, 60),
    "H200": Peak(989, 67),
    "B200": Peak(2250, 75),
    "A100": Peak(312, 19.5),
    "A10G": Peak(70, 35),
    "A10": Peak(125, 31.2),
    "A40": Peak(150, 37.4),
    "L40S": Peak(362, 91.6),
    "L40": Peak(181, 90.5),
    "L4": Peak(121, 30.3),
    "RTX 3090": Peak(71, 35.6),
    "RTX 4090": Peak(165, 82.6),
    "RTX 5090": Peak(210, 104.8),
}


class Metrics:
    """The quantities of a run's records beside the loss.

    Of several processes, the first one, which writes them, has those in bits per byte.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        first = trainer.processes.first
        self._spelling = spelling(trainer.corpus.tokenizer) if first else None
        self._of_validation: float | None = None  # bytes per predicted token, once it is counted
        self._flops = flops_per_token(trainer.config.model)  # without what is recomputed

    def of_training(self, loss: float, steps: int) -> dict[str, float]:
        """Perplexity, and bits per byte of text if the tokens are known as text.

        loss: mean over the last steps, of this number. The bytes are those that were predicted in
        them: they are counted again from the step numbers, so that a resumed run has the same.
        """
        trainer, config = self._trainer, self._trainer.config
        size, block = config.batch_size * config.accumulation, config.model.block_size
        train, done = trainer.corpus.train, trainer.steps_done
        places = (
            place
            for step in range(done - steps, done)
            for place in batch_places(train, size, block, seed=config.seed, step=step)
        )
        return self._of_loss(loss, self._bytes_per_token(train, places))

    def of_validation(self, loss: float) -> dict[str, float]:
        """The same of a validation loss, in whose windows the bytes are counted once."""
        if self._of_validation is None:
            config, validation = self._trainer.config, self._trainer.corpus.validation
            size, block = config.batch_size, config.model.block_size
            places = evaluation_places(validation, size, block, config.eval_batches)
            self._of_validation = self._bytes_per_token(validation, places)
        return self._of_loss(loss, self._of_validation)

    def _bytes_per_token(self, tokens: Tokens, places: Iterable[slice]) -> float | None:
        if self._spelling is None:
            return None
        apart = self._trainer.config.separate_documents
        return self._spelling.bytes_per_token(tokens, places, apart=apart)

    def _of_loss(self, loss: float, per_token: float | None) -> dict[str, float]:
        figures = {"perplexity": perplexity(loss)}
        if per_token:  # windows may have nothing but markers
            figures["bits_per_byte"] = loss / math.log(2) / per_token
        return figures

    def spent(self, step: int, seconds: float | None) -> dict[str, float]:
        """FLOPs of so many steps, forward and backward, and their seconds, if these are known."""
        figures = {"flops": step * self._trainer.config.flops_per_step}
        return figures if seconds is None else figures | {"seconds": seconds}

    def of_speed(self, tokens_per_second: float) -> dict[str, float]:
        """Tokens per second; model FLOPs utilisation, where the device's peak is known; peak memory
        in bytes, of the GPU's allocator or of the process.

        The utilisation is that of products of matrices, as the peak is, causal attention counted
        as causal and nothing twice.
        """
        device, precision = self._trainer.device, self._trainer.config.precision
        figures: dict[str, float] = {"tokens_per_second": tokens_per_second}
        peak = peak_operations(device, precision)
        if peak is not None:
            peak *= self._trainer.processes.count
            figures["mfu"] = tokens_per_second * self._flops.matrix / peak
        return figures | {"peak_memory": peak_memory(device)}


def peak_operations(device: torch.device, precision: str) -> float | None:
    """The device's peak in operations per second, of matrix products without sparsity.

    precision: "float32" or "bfloat16". Returns None for a GPU that is not in the table.
    """
    if device.type != "cuda":
        return measured_peak(precision)
    name = torch.cuda.get_device_name(device)
    peak: Any = next((peak for part, peak in GPUS.items() if re.search(rf"\b{part}\b", name)), None)
    return None if peak is None else getattr(peak, precision) * 1e12


@cache
def measured_peak(precision: str) -> float:
    """The speed of the fastest of some products of square matrices on this CPU, in operations/s.

    precision: "float32" or "bfloat16", the dtype of the matrices.
    """
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        matrix = torch.rand(SIDE, SIDE).to(getattr(torch, precision))
        seconds = []
        for _ in range(TRIES):
            started = time.perf_counter()
            matrix @ matrix
            seconds.append(time.perf_counter() - started)
    return 2.0 * SIDE**3 / min(seconds)


def peak_memory(device: torch.device) -> int:
    """The most bytes that torch has allocated on the GPU, or that the process has had in memory."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return peak_bytes()
