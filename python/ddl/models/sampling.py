"""Sampling: draw the next token from its logits."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from ddl.options import check_count, check_least

COLDEST = 1e-30  # its reciprocal fits float32; lower temperatures sample the same


@dataclass(frozen=True)
class Sampling:
    """Options of `GPT.generate`; raises ValueError if one is out of range."""

    temperature: float = 1.0
    top_k: int | None = None
    generator: torch.Generator | None = None

    def __post_init__(self) -> None:
        check_least("temperature", self.temperature)
        check_count("top_k", self.top_k, optional=True)
        if self.generator is not None and not isinstance(self.generator, torch.Generator):
            got = type(self.generator).__name__
            raise TypeError(f"`generator` must be a torch.Generator, got {got}")

    def draw(self, logits: Tensor) -> Tensor:
        """Draw one token per row of logits (B, vocab_size); returns (B, 1)."""
        if self.temperature == 0:
            return logits.argmax(dim=-1, keepdim=True)
        # Subtract the maximum first, so that a low temperature cannot overflow.
        logits = logits.float() - logits.float().amax(-1, keepdim=True)
        logits = logits / max(self.temperature, COLDEST)
        if self.top_k is not None and self.top_k < logits.shape[-1]:
            least = logits.topk(self.top_k).values[:, -1:]
            logits = logits.masked_fill(logits < least, -math.inf)
        probabilities = logits.softmax(dim=-1)
        if self.generator is not None:
            probabilities = probabilities.to(self.generator.device)
        return torch.multinomial(probabilities, 1, generator=self.generator).to(logits.device)
