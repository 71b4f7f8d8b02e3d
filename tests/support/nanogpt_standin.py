"""A stand-in for nanoGPT's model.py, written for these tests: its names, shapes and contracts.

It copies everything that `ddl.nanogpt.convert` and a training script rely on: the modules and their
names, the tied head, the fused c_attn, LayerNorm with or without bias, dropout in four places,
initialisation by module type through `apply`, logits of the last position only at inference, and
weight decay by the number of dimensions. `from_pretrained` takes a directory for GPT-2's name.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass
class GPTConfig:
    """nanoGPT's fields, and `flash`, which nanoGPT sets by torch's version."""

    block_size: int = 16
    vocab_size: int = 64
    n_layer: int = 2
    n_head: int = 2
    n_embd: int = 16
    dropout: float = 0.0
    bias: bool = True
    flash: bool = True


class LayerNorm(nn.Module):
    def __init__(self, width: int, bias: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.bias = nn.Parameter(torch.zeros(width)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, self.weight.shape, self.weight, self.bias, 1e-5)


class CausalSelfAttention(nn.Module):
    bias: Tensor  # the causal mask, if `flash` is off

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        d, size = config.n_embd, config.block_size
        self.c_attn = nn.Linear(d, 3 * d, bias=config.bias)
        self.c_proj = nn.Linear(d, d, bias=config.bias)
        self.attn_dropout = nn.Dropout(config.dropout)
        self.resid_dropout = nn.Dropout(config.dropout)
        self.n_head, self.dropout, self.flash = config.n_head, config.dropout, config.flash
        if not self.flash:
            mask = torch.ones(size, size).tril().view(1, 1, size, size)
            self.register_buffer("bias", mask)

    def forward(self, x: Tensor) -> Tensor:
        T = x.shape[1]
        qkv = self.c_attn(x).unflatten(-1, (3, self.n_head, -1))  # (B, T, 3, H, d/H)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        if self.flash:
            p = self.dropout if self.training else 0.0
            y = F.scaled_dot_product_attention(q, k, v, dropout_p=p, is_causal=True)
        else:
            scores = q @ k.mT / math.sqrt(q.shape[-1])
            scores = scores.masked_fill(self.bias[:, :, :T, :T] == 0, -math.inf)
            y = self.attn_dropout(scores.softmax(dim=-1)) @ v
        return self.resid_dropout(self.c_proj(y.transpose(1, 2).flatten(2)))


class MLP(nn.Module):
    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        d = config.n_embd
        self.c_fc = nn.Linear(d, 4 * d, bias=config.bias)
        self.gelu = nn.GELU()
        self.c_proj = nn.Linear(4 * d, d, bias=config.bias)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor) -> Tensor:
        return self.dropout(self.c_proj(self.gelu(self.c_fc(x))))


class Block(nn.Module):
    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.ln_1 = LayerNorm(config.n_embd, bias=config.bias)
        self.attn = CausalSelfAttention(config)
        self.ln_2 = LayerNorm(config.n_embd, bias=config.bias)
        self.mlp = MLP(config)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    block = Block  # replaced by the tests of the manual conversion

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        d = config.n_embd
        self.transformer = nn.ModuleDict(
            {
                "wte": nn.Embedding(config.vocab_size, d),
                "wpe": nn.Embedding(config.block_size, d),
                "drop": nn.Dropout(config.dropout),
                "h": nn.ModuleList(self.block(config) for _ in range(config.n_layer)),
                "ln_f": LayerNorm(d, bias=config.bias),
            }
        )
        self.lm_head = nn.Linear(d, config.vocab_size, bias=False)
        self.transformer.wte.weight = self.lm_head.weight
        self.apply(self._init_weights)
        for name, parameter in self.named_parameters():
            if name.endswith("c_proj.weight"):
                nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * config.n_layer))

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)

    def get_num_params(self, non_embedding: bool = True) -> int:
        total = sum(p.numel() for p in self.parameters())
        return total - self.transformer.wpe.weight.numel() * non_embedding

    def forward(self, idx: Tensor, targets: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        T = idx.shape[1]
        assert self.config.block_size >= T
        positions = torch.arange(T, device=idx.device)
        x = self.transformer.drop(self.transformer.wte(idx) + self.transformer.wpe(positions))
        for block in self.transformer.h:
            x = block(x)
        x = self.transformer.ln_f(x)
        if targets is None:
            return self.lm_head(x[:, -1:]), None
        logits = self.lm_head(x)
        return logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-1)

    def crop_block_size(self, block_size: int) -> None:
        assert block_size <= self.config.block_size
        self.config.block_size = block_size
        wpe = self.transformer.wpe
        wpe.weight = nn.Parameter(wpe.weight[:block_size])
        for block in self.transformer.h:
            if hasattr(block.attn, "bias"):
                block.attn.bias = block.attn.bias[:, :, :block_size, :block_size]

    @classmethod
    def from_pretrained(cls, model_type: str, override_args: dict[str, Any] | None = None) -> Any:
        from transformers import GPT2LMHeadModel

        theirs = GPT2LMHeadModel.from_pretrained(model_type)
        c = theirs.config
        sizes = (c.n_positions, c.vocab_size, c.n_layer, c.n_head, c.n_embd)
        model = GPT(GPTConfig(*sizes, bias=True, **(override_args or {})))
        ours, state = model.state_dict(), theirs.state_dict()
        assert len(ours) == len(state), f"mismatched keys: {len(state)} != {len(ours)}"
        for name, tensor in state.items():
            transposed = name.split(".")[-2].startswith("c_") and tensor.ndim == 2
            with torch.no_grad():
                ours[name].copy_(tensor.t() if transposed else tensor)
        return model

    def configure_optimizers(
        self, weight_decay: float, learning_rate: float, betas: Any, device_type: str
    ) -> torch.optim.AdamW:
        trained = [p for _, p in self.named_parameters() if p.requires_grad]
        groups = [
            {"params": [p for p in trained if p.dim() >= 2], "weight_decay": weight_decay},
            {"params": [p for p in trained if p.dim() < 2], "weight_decay": 0.0},
        ]
        fused = {"fused": True} if device_type == "cuda" else {}
        return torch.optim.AdamW(groups, lr=learning_rate, betas=betas, **fused)

    def estimate_mfu(self, fwdbwd_per_iter: int, dt: float) -> float:
        c = self.config
        per_token = 6 * self.get_num_params() + 12 * c.n_layer * c.n_embd * c.block_size
        return per_token * c.block_size * fwdbwd_per_iter / dt / 312e12

    @torch.no_grad()
    def generate(
        self, idx: Tensor, max_new_tokens: int, temperature: float = 1.0, top_k: int | None = None
    ) -> Tensor:
        for _ in range(max_new_tokens):
            logits = self(idx[:, -self.config.block_size :])[0][:, -1] / temperature
            if top_k is not None:
                least = logits.topk(min(top_k, logits.shape[-1])).values[:, -1:]
                logits = logits.masked_fill(logits < least, -math.inf)
            idx = torch.cat((idx, torch.multinomial(logits.softmax(-1), 1)), dim=1)
        return idx
