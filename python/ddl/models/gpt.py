"""The Transformer of Deep Delta Learning (arXiv 2601.00417), with the residual as its one choice.

    x = wte(idx);  h = trunk(x);  logits = h · wteᵀ

The trunk owns the residual stream and calls the sublayers attention, MLP, attention, MLP, … on
its normalised read. Sublayers and embedding are the same for every residual, and from one seed they
start from the same numbers.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ddl.config import GPTConfig
from ddl.nn.stream import DeltaStream
from ddl.ops.checks import check_is_tensor
from ddl.options import check_count, is_whole

from .cache import Cache
from .sampling import Sampling
from .sublayers import Attention, Rotary, SwiGLU, wide
from .tokens import check_vocabulary
from .trunk import AdditiveStream, contexts, make_trunk

EMBEDDING_STD = 0.02
HIDDEN_STD_FACTOR = 0.5  # hidden matrices start with std 0.5/√d
IGNORE = -100  # cross_entropy's "no target here"


class GPTOutput(NamedTuple):
    """What `GPT` returns.

    logits: (B, T, vocab_size), in the dtype of the matrix products.
    loss: scalar, mean next-token cross-entropy in nats, float32 (float64 for a float64 model);
        None without labels.
    """

    logits: Tensor
    loss: Tensor | None


class GPT(nn.Module):
    """Decoder-only language model; `config.residual` selects additive or one of the DDL streams.

    Construction on the meta device, `to_empty`, then `reset_parameters()` gives a fresh model.
    """

    trunk: AdditiveStream | DeltaStream

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        if not isinstance(config, GPTConfig):
            raise TypeError(f"`config` must be a GPTConfig, got {type(config).__name__}")
        self.config = config
        self.wte = nn.Embedding(config.vocab_size, config.hidden_size)
        sublayers = nn.ModuleList()
        for layer in range(config.num_layers):
            sublayers.extend((Attention(config, layer), SwiGLU(config)))
        # Before the trunk exists, so that the random stream up to here knows no residual variant.
        self._reset_backbone(sublayers)
        self.trunk = make_trunk(config, sublayers)

    def reset_parameters(self) -> None:
        """Draw all parameters anew: first the backbone, then what the residual adds."""
        self._reset_backbone(self.trunk.sublayers)
        self.trunk.reset_parameters()

    @torch.no_grad()
    def _reset_backbone(self, sublayers: nn.ModuleList) -> None:
        """The paper's µP-style start: embedding std 0.02, hidden matrices std 0.5/√d, norms one."""
        std = HIDDEN_STD_FACTOR / math.sqrt(self.config.hidden_size)
        nn.init.normal_(self.wte.weight, std=EMBEDDING_STD)
        for module in sublayers.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=std)
            elif isinstance(module, nn.RMSNorm | Rotary):
                module.reset_parameters()

    def forward(
        self,
        idx: Tensor,
        labels: Tensor | None = None,
        *,
        attention_mask: Tensor | None = None,
        cache: Cache | None = None,
        last: int | None = None,
    ) -> GPTOutput:
        """Logits of the next token, and the loss if `labels` are given.

        Args:
            idx: (B, T) int64 or int32 tokens, T ≤ block_size.
            labels: (B, T) int64, usually `idx` itself: they are shifted here, position t is scored
                against labels[t + 1], and −100 is left out.
            attention_mask: (B, T) of ones and, for padding, zeros; with a cache (B, cache.length +
                T), and the padding on the left. What a row's real tokens give does not depend on
                its padding.
            cache: what it saw comes before idx; idx is added to it. None for whole sequences.
            last: of how many tokens at the end of idx logits are wanted; None for all.

        Raises:
            TypeError: a wrong dtype. ValueError: anything else that does not fit.
        """
        self._check_tokens(idx, longest=self.config.block_size)
        if labels is not None:
            self._check_labels(labels, idx)
        fits = last is None or (is_whole(last) and 1 <= last <= idx.shape[1] and labels is None)
        if not fits:
            expected = f"from 1 to {idx.shape[1]}, the tokens of `idx`, and without `labels`"
            raise ValueError(f"`last` must be {expected}, got {last!r}")
        h = self.contexts(self.wte(idx), attention_mask=attention_mask, cache=cache)
        logits = self._logits(h if last is None else h[:, -last:])
        if labels is None:
            return GPTOutput(logits, None)
        # The labels move instead of the logits: slicing those would copy them all.
        targets = F.pad(labels[:, 1:], (0, 1), value=IGNORE)
        loss = F.cross_entropy(wide(logits.flatten(0, 1)), targets.flatten(), ignore_index=IGNORE)
        return GPTOutput(logits, loss)

    def contexts(
        self, x: Tensor, *, attention_mask: Tensor | None = None, cache: Cache | None = None
    ) -> Tensor:
        """Embeddings (B, T, d) → what the head reads, (B, T, d): `forward` without its two ends."""
        return contexts(self.trunk, self.config, x, attention_mask=attention_mask, cache=cache)

    def generate(
        self,
        idx: Tensor,
        max_new_tokens: int,
        *,
        temperature: float = 1.0,
        top_k: int | None = None,
        generator: torch.Generator | None = None,
        progress: Callable[[], object] | None = None,
    ) -> Tensor:
        """Continue idx (B, T) by `max_new_tokens` sampled tokens → (B, T + max_new_tokens).

        Only the last block_size tokens are looked at: up to there a token costs one token, thanks
        to a cache, and beyond it a whole block. temperature 0 takes the likeliest token; `top_k`
        samples among the k likeliest. Equal seeds of a CPU `generator` give equal samples on every
        device; without one, or with the device's own, the host never waits. `progress` is called
        after every token. Raises ValueError for a negative temperature, top_k < 1, an empty idx.
        """
        sampling = Sampling(temperature, top_k, generator)
        check_count("max_new_tokens", max_new_tokens, least=0)
        self._check_tokens(idx, longest=None)
        length, block = idx.shape[1], self.config.block_size
        out = F.pad(idx, (0, max_new_tokens))
        cache: Cache | None = Cache(self.config)
        new = out[:, max(0, length - block) : length]
        for end in range(length, length + max_new_tokens):
            if end > block:  # the window moves on, and all in it have other tokens before them
                cache, new = None, out[:, end - block : end]
            with torch.inference_mode():  # `out` was made outside: it may go into a training step
                logits = self(new, cache=cache, last=1).logits[:, -1]
                out[:, end : end + 1] = sampling.draw(logits)
            new = out[:, end : end + 1]
            if progress is not None:
                progress()
        return out

    def num_parameters(self) -> int:
        """Number of parameters; the tied head counts once."""
        return sum(p.numel() for p in self.parameters())

    def _logits(self, h: Tensor) -> Tensor:
        # The tied head is the embedding itself: one parameter, one name, nothing to tie again.
        return F.linear(h, self.wte.weight)

    def _check_tokens(self, idx: Any, *, longest: int | None) -> None:
        check_is_tensor("idx", idx)
        if idx.dtype not in (torch.int64, torch.int32):
            raise TypeError(f"`idx` must have dtype int64 or int32, got {idx.dtype}")
        if idx.ndim != 2 or idx.shape[1] < 1 or (longest is not None and idx.shape[1] > longest):
            most = "tokens" if longest is None else f"1 to block_size = {longest}"
            raise ValueError(f"`idx` must have shape (batch, {most}), got {tuple(idx.shape)}")
        self._check_numbers("idx", idx)

    def _check_labels(self, labels: Any, idx: Tensor) -> None:
        check_is_tensor("labels", labels)
        if labels.dtype != torch.int64:
            raise TypeError(f"`labels` must have dtype int64, got {labels.dtype}")
        if labels.shape != idx.shape or idx.shape[1] < 2:
            expected = f"the shape of `idx`, {tuple(idx.shape)}, with at least 2 tokens"
            raise ValueError(f"`labels` must have {expected}, got {tuple(labels.shape)}")
        self._check_numbers("labels", labels, besides=IGNORE)

    def _check_numbers(self, name: str, tokens: Tensor, besides: int | None = None) -> None:
        """Raises ValueError for another device than the model's, or no token of its vocabulary."""
        device = self.wte.weight.device
        if tokens.device != device:
            raise ValueError(f"`{name}` must be on {device}, got a tensor on {tokens.device}")
        check_vocabulary(name, tokens, self.config.vocab_size, besides)
