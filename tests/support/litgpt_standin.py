"""A small model with the interface of litgpt/model.py, as docs/trainers.md changes it; written for
the tests.

Blocks are called with rotations, a mask, the positions and one more than the last of them. A cache
of keys and values lies in each attention; `set_kv_cache` makes all of them, and a call with
`input_pos` uses them. Linear layers are reset from outside, everything else by itself.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor


@dataclass
class Config:
    block_size: int = 24
    n_layer: int = 2
    n_embd: int = 16
    n_head: int = 2
    padded_vocab_size: int = 40
    norm_eps: float = 1e-5
    norm_class_name: str = "RMSNorm"
    norm_1: bool = True
    norm_2: bool = True
    post_attention_norm: bool = False
    post_mlp_norm: bool = False
    parallel_residual: bool = False
    rope_indices: list[int] | None = None


def norm_of(config: Config, wanted: bool = True) -> nn.Module:
    return nn.RMSNorm(config.n_embd, eps=config.norm_eps) if wanted else nn.Identity()


class GPT(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config, d = config, config.n_embd
        self.lm_head = nn.Linear(d, config.padded_vocab_size, bias=False)
        parts = {
            "wte": nn.Embedding(config.padded_vocab_size, d),
            "h": nn.ModuleList(Block(config, block_idx) for block_idx in range(config.n_layer)),
            "ln_f": norm_of(config),
        }
        self.transformer = nn.ModuleDict(parts)
        self.mask_cache: Tensor | None = None
        angles = torch.outer(torch.arange(config.block_size), 10.0 ** -torch.arange(d // 4))
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def forward(self, idx: Tensor, input_pos: Any = None, input_pos_maxp1: Any = None) -> Tensor:
        mask = None
        positions = torch.arange(idx.shape[1], device=idx.device)
        if input_pos is not None:
            if self.mask_cache is None:
                raise TypeError("there is no cache")
            positions, mask = input_pos, self.mask_cache[input_pos, :input_pos_maxp1]
        cos, sin = self.cos[positions], self.sin[positions]
        x = self.transformer.wte(idx)
        for block_idx, block in enumerate(self.transformer.h):
            if self.config.rope_indices is not None:
                raise NotImplementedError(f"rotations of its own in block {block_idx}")
            x = block(x, cos, sin, mask, input_pos, input_pos_maxp1)
        x = self.transformer.ln_f(x)
        return self.lm_head(x)

    def set_kv_cache(self, batch_size: int, max_seq_length: int | None = None) -> None:
        time, like = max_seq_length or self.config.block_size, self.lm_head.weight
        for block in self.transformer.h:
            heads, size = block.attn.heads, self.config.n_embd // block.attn.heads
            block.attn.kv_cache = like.new_zeros(2, batch_size, heads, time, size)
        self.mask_cache = torch.ones(time, time, dtype=torch.bool).tril()

    def clear_kv_cache(self) -> None:
        self.mask_cache = None
        for block in self.transformer.h:
            block.attn.kv_cache = None


class Block(nn.Module):
    def __init__(self, config: Config, block_idx: int) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = norm_of(config, config.norm_1), norm_of(config, config.norm_2)
        self.attn, self.mlp = CausalSelfAttention(config, block_idx), LLaMAMLP(config)
        self.post_attention_norm = norm_of(config, config.post_attention_norm)
        self.post_mlp_norm = norm_of(config, config.post_mlp_norm)

    def forward(self, x: Tensor, *args: Any) -> Tensor:
        x = self.post_attention_norm(self.attn(self.norm_1(x), *args)) + x
        return self.post_mlp_norm(self.mlp(self.norm_2(x))) + x


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    left, right = x.chunk(2, dim=-1)
    return torch.cat((left * cos - right * sin, right * cos + left * sin), dim=-1)


class CausalSelfAttention(nn.Module):
    def __init__(self, config: Config, block_idx: int) -> None:
        super().__init__()
        self.heads, d = config.n_head, config.n_embd
        self.qkv, self.proj = nn.Linear(d, 3 * d, bias=False), nn.Linear(d, d, bias=False)
        self.kv_cache: Tensor | None = None

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, mask: Any, input_pos: Any, input_pos_maxp1: Any
    ) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        q, k = rotated(q, cos, sin), rotated(k, cos, sin)
        if input_pos is not None:
            self.kv_cache[:, : x.shape[0], :, input_pos] = torch.stack((k, v))
            k, v = self.kv_cache[:, : x.shape[0], :, :input_pos_maxp1]
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None)
        return self.proj(y.transpose(1, 2).flatten(2))


class LLaMAMLP(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        d = config.n_embd
        self.fc_1, self.fc_2 = nn.Linear(d, 3 * d, bias=False), nn.Linear(d, 3 * d, bias=False)
        self.proj = nn.Linear(3 * d, d, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.proj(F.silu(self.fc_1(x)) * self.fc_2(x))


def initialize_weights(model: GPT) -> None:
    """As litgpt/pretrain.py: linear layers and embeddings from outside, the rest by itself."""
    for module in model.modules():
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=0.1)
        elif callable(getattr(module, "reset_parameters", None)):
            module.reset_parameters()
