"""Figures of a run beside its loss: perplexity, bits per byte, utilisation, memory."""

from __future__ import annotations

import math
import re
import time
from functools import cache
from typing import Any, NamedTuple

import torch

from ddl.config import GPTConfig
from ddl.data import ByteTokenizer, Corpus
from ddl.errors import InputError
from ddl.machine import peak_bytes

from .trainer import Trainer

# Names of the figures that are measured: they differ between a run and its repetition.
MEASURED = ("tokens_per_second", "mfu", "peak_memory")

DECODED = 2**16  # validation tokens whose bytes are counted
LARGEST_EXPONENT = 700.0  # exp overflows a float64 above 709
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


def perplexity(loss: float) -> float:
    """exp(loss), with a loss in nats per token; a huge loss gives a huge number instead of ∞."""
    return math.exp(min(loss, LARGEST_EXPONENT))


class Metrics:
    """The quantities of a run's records beside the loss."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self._bytes_per_token = bytes_per_token(trainer.corpus)
        self._operations = operations_per_token(
            trainer.config.model, trainer.model.num_parameters()
        )

    def of_loss(self, loss: float) -> dict[str, float]:
        """Perplexity, and bits per byte of text if the tokens are known as text."""
        figures = {"perplexity": perplexity(loss)}
        if self._bytes_per_token is not None:
            figures["bits_per_byte"] = loss / math.log(2) / self._bytes_per_token
        return figures

    def of_speed(self, tokens_per_second: float) -> dict[str, float]:
        """Tokens per second; model FLOPs utilisation, where the device's peak is known; peak memory
        in bytes, of the GPU's allocator or of the process."""
        device, precision = self._trainer.device, self._trainer.config.precision
        figures: dict[str, float] = {"tokens_per_second": tokens_per_second}
        peak = peak_operations(device, precision)
        if peak is not None:
            peak *= self._trainer.processes.count
            figures["mfu"] = tokens_per_second * self._operations / peak
        return figures | {"peak_memory": peak_memory(device)}


def operations_per_token(config: GPTConfig, parameters: int) -> float:
    """Operations of forward and backward per token, by the rule of PaLM (arXiv 2204.02311, B).

    6 per parameter and 12·L·H·Q·T for attention. What a residual computes beside its matrix
    products is not counted, so that residuals are compared by the time that they take.
    """
    attention = config.num_layers * config.num_heads * config.head_dim * config.block_size
    return 6.0 * parameters + 12.0 * attention


def bytes_per_token(corpus: Corpus) -> float | None:
    """Bytes of UTF-8 per validation token; None if the tokenizer cannot be had."""
    if isinstance(corpus.tokenizer, ByteTokenizer):
        return 1.0
    tokens = corpus.validation[:DECODED].tolist()
    try:
        return len(corpus.tokenizer.decode(tokens).encode("utf-8")) / len(tokens)
    except InputError:  # GPT-2's byte pairs are not there
        return None


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
