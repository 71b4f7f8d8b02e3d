"""nanoGPT's model, for its checkpoints: additive, or converted by `ddl.nanogpt.convert`.

It has the names and shapes of nanoGPT's GPT, so that a checkpoint's state dict fits, and computes
the same: LayerNorms with or without bias, learned positions, a fused c_attn, GELU, a tied head.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ddl.fields import check_counts
from ddl.nanogpt import convert
from ddl.ops.checks import check_is_tensor
from ddl.options import Residual, check_count, check_flag, check_share, refuse

from .config import residual_of
from .sampling import Sampling
from .tokens import check_length, check_vocabulary

STD = 0.02


@dataclass(frozen=True)
class NanoGPTConfig:
    """nanoGPT's `model_args`, and the options of `ddl.nanogpt.convert`.

    delta: the options; None for the model that adds. Raises InputError for a value out of range.
    """

    n_layer: int = 12
    n_head: int = 12
    n_embd: int = 768
    block_size: int = 1024
    vocab_size: int = 50304
    bias: bool = False
    dropout: float = 0.0
    delta: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        check_counts(self, "n_layer n_head n_embd block_size vocab_size")
        if self.n_embd % self.n_head:
            refuse("n_head", f"a divisor of n_embd, {self.n_embd}", self.n_head)
        check_flag("bias", self.bias)
        if self.dropout != 0:
            check_share("dropout", self.dropout)
        if self.delta is not None and not isinstance(self.delta, dict):
            refuse("delta", "options by their names, or None", self.delta)

    @property
    def residual(self) -> Residual:
        """The papers' name of the stream: "additive", "ddl", "ddl-cc", …"""
        if self.delta is None:
            return "additive"
        one_channel = self.delta.get("value_channels", 1) == 1
        compress = self.delta.get("compress") or ("identity" if one_channel else "channel")
        expand = "repeat" if compress == "identity" else self.delta.get("expand", "repeat")
        return residual_of(compress, expand)


class CausalSelfAttention(nn.Module):
    """Attention (B, T, d) → (B, T, d) with one projection for queries, keys and values."""

    def __init__(self, config: NanoGPTConfig) -> None:
        super().__init__()
        d = config.n_embd
        self.c_attn = nn.Linear(d, 3 * d, bias=config.bias)
        self.c_proj = nn.Linear(d, d, bias=config.bias)
        self.resid_dropout = nn.Dropout(config.dropout)
        self.n_head, self.dropout = config.n_head, config.dropout

    def forward(self, x: Tensor) -> Tensor:
        parts = self.c_attn(x).chunk(3, dim=-1)
        q, k, v = (torch.unflatten(part, -1, (self.n_head, -1)).transpose(1, 2) for part in parts)
        out: Tensor = self.resid_dropout(self.c_proj(self.attend(q, k, v).flatten(2)))
        return out

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Map q, k and v (B, H, T, head_dim) to (B, T, H, head_dim)."""
        p = self.dropout if self.training else 0.0
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=p, is_causal=True)
        return y.transpose(1, 2)


class MLP(nn.Module):
    """Linear, GELU, linear: (B, T, d) → (B, T, d), with 4d hidden units."""

    def __init__(self, config: NanoGPTConfig) -> None:
        super().__init__()
        d = config.n_embd
        self.c_fc = nn.Linear(d, 4 * d, bias=config.bias)
        self.c_proj = nn.Linear(4 * d, d, bias=config.bias)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.dropout(self.c_proj(F.gelu(self.c_fc(x))))
        return out


class Block(nn.Module):
    """x + attn(ln_1(x)), then x + mlp(ln_2(x))."""

    def __init__(self, config: NanoGPTConfig) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(config.n_embd, bias=config.bias)
        self.attn = CausalSelfAttention(config)
        self.ln_2 = nn.LayerNorm(config.n_embd, bias=config.bias)
        self.mlp = MLP(config)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        out: Tensor = x + self.mlp(self.ln_2(x))
        return out


class NanoGPT(nn.Module):
    """nanoGPT's GPT, additive or converted.

    `transformer` and `lm_head` have nanoGPT's names. With `config.delta` the model is converted,
    and `logits_of_state` maps a state of its stream to logits.
    """

    def __init__(self, config: NanoGPTConfig) -> None:
        super().__init__()
        self.config = config
        d = config.n_embd
        self.transformer = nn.ModuleDict(
            {
                "wte": nn.Embedding(config.vocab_size, d),
                "wpe": nn.Embedding(config.block_size, d),
                "drop": nn.Dropout(config.dropout),
                "h": nn.ModuleList(Block(config) for _ in range(config.n_layer)),
                "ln_f": nn.LayerNorm(d, bias=config.bias),
            }
        )
        self.lm_head = nn.Linear(d, config.vocab_size, bias=False)
        self.wte.weight = self.lm_head.weight
        self._initialise()
        if config.delta is not None:
            convert(self, **config.delta)

    @torch.no_grad()
    def _initialise(self) -> None:
        """Draw weights with std 0.02, and those that write into the stream with 0.02/√(2L)."""
        for name, parameter in self.named_parameters():
            last = name.endswith("c_proj.weight")
            if parameter.ndim > 1:
                parameter.normal_(std=STD / math.sqrt(2 * self.config.n_layer) if last else STD)
            elif name.endswith("bias"):
                parameter.zero_()

    @property
    def wte(self) -> nn.Embedding:
        """The embedding, as in `ddl.models.GPT`."""
        wte: nn.Embedding = self.transformer.wte  # type: ignore[assignment]
        return wte

    def forward(self, idx: Tensor, last: int | None = None) -> Tensor:
        """Logits (B, T, vocab_size) of the next token.

        idx: (B, T) int64 tokens, T ≤ block_size. last: of only this many tokens at the end.
        Raises ValueError if `idx` does not fit.
        """
        check_is_tensor("idx", idx)
        check_length(idx, self.config.block_size)
        check_vocabulary("idx", idx, self.config.vocab_size)
        x = hidden_states(self.transformer, self.wte(idx))
        logits: Tensor = self.lm_head(x if last is None else x[:, -last:])
        return logits

    def generate(
        self,
        idx: Tensor,
        max_new_tokens: int,
        *,
        progress: Callable[[], object] | None = None,
        **options: Any,
    ) -> Tensor:
        """Continue idx (B, T) by `max_new_tokens` tokens, with the arguments of `GPT.generate`.

        The model sees the last block_size tokens, all of them again for each new one. options:
        temperature, top_k, top_p, vocabulary and generator.
        """
        sampling = Sampling(**options)
        check_count("max_new_tokens", max_new_tokens, least=0)
        for _ in range(max_new_tokens):
            with torch.inference_mode():
                logits = self(idx[:, -self.config.block_size :], last=1)[:, -1]
                idx = torch.cat((idx, sampling.draw(logits)), dim=1)
            if progress is not None:
                progress()
        return idx.clone()  # no inference tensor, so that it may be used in a training step

    def num_parameters(self) -> int:
        """Number of parameters; the tied head and embedding count once."""
        return sum(p.numel() for p in self.parameters())


def hidden_states(transformer: Any, x: Tensor) -> Tensor:
    """Map embeddings of tokens (B, T, d) to the head's input (B, T, d)."""
    x = transformer.drop(x + transformer.wpe(torch.arange(x.shape[1], device=x.device)))
    for block in transformer.h:
        x = block(x)
    out: Tensor = transformer.ln_f(x)
    return out
