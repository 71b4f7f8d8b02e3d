"""Sampling: draw the next token from its logits."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from ddl.options import check_count, check_least, check_share

COLDEST = 1e-30  # its reciprocal fits float32; lower temperatures sample the same


@dataclass(frozen=True)
class Sampling:
    """Options of `GPT.generate`; raises ValueError if one is out of range.

    top_p is that of nucleus sampling (Holtzman et al. 2020, arXiv 1904.09751).
    """

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None
    generator: torch.Generator | None = None
    vocabulary: int | None = None

    def __post_init__(self) -> None:
        check_least("temperature", self.temperature)
        check_count("top_k", self.top_k, optional=True)
        check_share("top_p", self.top_p, optional=True)
        check_count("vocabulary", self.vocabulary, optional=True)

    def draw(self, logits: Tensor) -> Tensor:
        """Draw one token per row of logits (B, vocab_size); returns (B, 1)."""
        logits = logits[:, : self.vocabulary]
        if self.temperature == 0:
            return logits.argmax(dim=-1, keepdim=True)
        # Subtract the maximum first, so that a low temperature cannot overflow.
        logits = logits.float() - logits.float().amax(-1, keepdim=True)
        logits = logits / max(self.temperature, COLDEST)
        if self.top_k is not None and self.top_k < logits.shape[-1]:
            least = logits.topk(self.top_k).values[:, -1:]
            logits = logits.masked_fill(logits < least, -math.inf)
        probabilities = logits.softmax(dim=-1)
        if self.top_p is not None and self.top_p < 1:  # 1 must not drop what rounding of sums drops
            likeliest, tokens = probabilities.sort(dim=-1, descending=True, stable=True)
            likelier = F.pad(likeliest.cumsum(dim=-1)[..., :-1], (1, 0))  # the sum of those before
            likeliest = likeliest.masked_fill(likelier >= self.top_p, 0)  # nothing is rescaled
            probabilities = probabilities.scatter(-1, tokens, likeliest)
        if self.generator is not None:
            probabilities = probabilities.to(self.generator.device)
        return torch.multinomial(probabilities, 1, generator=self.generator).to(logits.device)
