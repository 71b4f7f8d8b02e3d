"""Sampling: how the next token is drawn from its logits."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Sampling:
    """Options of `GPT.generate`, checked: raises ValueError for one that is out of range."""

    temperature: float = 1.0
    top_k: int | None = None
    generator: torch.Generator | None = None

    def __post_init__(self) -> None:
        if not self.temperature >= 0:
            raise ValueError(f"`temperature` must be at least 0, got {self.temperature}")
        if self.top_k is not None and self.top_k < 1:
            raise ValueError(f"`top_k` must be at least 1, got {self.top_k}")

    def draw(self, logits: Tensor) -> Tensor:
        """One token per row of logits (B, vocab_size) → (B, 1)."""
        if self.temperature == 0:
            return logits.argmax(dim=-1, keepdim=True)
        logits = logits.float() / self.temperature
        if self.top_k is not None and self.top_k < logits.shape[-1]:
            least = logits.topk(self.top_k).values[:, -1:]
            logits = logits.masked_fill(logits < least, -math.inf)
        probabilities = logits.softmax(dim=-1)
        if self.generator is not None:
            probabilities = probabilities.to(self.generator.device)
        return torch.multinomial(probabilities, 1, generator=self.generator).to(logits.device)
