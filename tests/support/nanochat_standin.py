"""A small model with nanochat's interface, as ddl.nanochat meets it; written for the tests.

Blocks take value embeddings, rotations, a window and a cache, of which the MLP gets none; the norm
has no weight; the stream is scaled and mixed with the first embedding before each block, and half
of the way is taken back at the end. Models are made on meta and filled by `init_weights`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

DTYPE = {"compute": torch.float32}  # of activations and embeddings


@dataclass
class GPTConfig:
    sequence_len: int = 32
    vocab_size: int = 40
    n_layer: int = 3
    n_head: int = 2
    n_embd: int = 16


def norm(x: Tensor) -> Tensor:
    return F.rms_norm(x, (x.size(-1),))


class Linear(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.to(x.dtype))


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    left, right = x.chunk(2, dim=-1)
    return torch.cat((left * cos + right * sin, right * cos - left * sin), dim=-1)


class Attention(nn.Module):
    def __init__(self, config: GPTConfig, layer: int) -> None:
        super().__init__()
        d = config.n_embd
        self.layer, self.heads = layer, config.n_head
        self.c_q, self.c_k, self.c_v, self.c_proj = (Linear(d, d, bias=False) for _ in range(4))
        self.ve_gate = Linear(4, config.n_head, bias=False) if layer % 2 == 0 else None

    def forward(self, x: Tensor, ve: Any, cos_sin: Any, window: int, kv_cache: Any) -> Tensor:
        q, k, v = (c(x).unflatten(-1, (self.heads, -1)) for c in (self.c_q, self.c_k, self.c_v))
        if ve is not None:
            gate = 3 * torch.sigmoid(self.ve_gate(x[..., :4]))
            v = v + gate.unsqueeze(-1) * ve.unflatten(-1, (self.heads, -1))
        q, k = (1.2 * norm(rotated(each, *cos_sin)) for each in (q, k))
        if kv_cache is not None:
            k, v = kv_cache.extend(self.layer, k, v)
        now = torch.arange(k.shape[1], device=x.device)
        back = now[-q.shape[1] :, None] - now
        seen = (back >= 0) & (back <= window)
        q, k, v = (each.transpose(1, 2) for each in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=seen)
        return self.c_proj(y.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        d = config.n_embd
        self.c_fc, self.c_proj = Linear(d, 4 * d, bias=False), Linear(4 * d, d, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.c_proj(F.relu(self.c_fc(x)).square())


class Block(nn.Module):
    def __init__(self, config: GPTConfig, layer: int) -> None:
        super().__init__()
        self.attn, self.mlp = Attention(config, layer), MLP(config)

    def forward(self, x: Tensor, ve: Any, cos_sin: Any, window: int, kv_cache: Any) -> Tensor:
        x = x + self.attn(norm(x), ve, cos_sin, window, kv_cache)
        return x + self.mlp(norm(x))


class GPT(nn.Module):
    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config, n, d = config, config.n_layer, config.n_embd
        self.windows = [6 if layer % 2 else config.sequence_len for layer in range(n)]
        self.transformer = nn.ModuleDict(
            {
                "wte": nn.Embedding(config.vocab_size, d),
                "h": nn.ModuleList(Block(config, layer) for layer in range(n)),
            }
        )
        self.lm_head = Linear(d, config.vocab_size, bias=False)
        self.resid_lambdas, self.x0_lambdas = (nn.Parameter(torch.ones(n)) for _ in range(2))
        self.smear_gate, self.smear_lambda = Linear(6, 1, bias=False), nn.Parameter(torch.zeros(1))
        self.backout_lambda = nn.Parameter(torch.full((1,), 0.2))
        embeddings = {str(i): nn.Embedding(config.vocab_size, d) for i in range(0, n, 2)}
        self.value_embeds = nn.ModuleDict(embeddings)
        self.register_buffer("angles", self._angles(), persistent=False)

    def _angles(self) -> Tensor:
        width = self.config.n_embd // self.config.n_head // 2
        rates = 100.0 ** -(torch.arange(width) / width)
        return torch.outer(torch.arange(10.0 * self.config.sequence_len), rates)[:, None]

    @torch.no_grad()
    def init_weights(self) -> None:
        s = (3 / self.config.n_embd) ** 0.5
        for name, parameter in self.named_parameters():
            if name.startswith("transformer.h") and name.split(".")[3] not in ("attn", "mlp"):
                continue  # as nanochat, which names its own
            if name.endswith("c_proj.weight"):
                parameter.zero_()
            else:
                parameter.uniform_(-s, s)
        for values, first in ((self.resid_lambdas, 1.15), (self.x0_lambdas, 0.2)):
            values.copy_(torch.linspace(first, first - 0.1, len(values)))
        self.smear_lambda.zero_()
        self.backout_lambda.fill_(0.2)
        self.angles = self._angles().to(self.lm_head.weight.device)
        for embedding in (self.transformer.wte, *self.value_embeds.values()):
            embedding.to(DTYPE["compute"])

    def setup_optimizer(self, matrix_lr: float = 0.02, weight_decay: float = 0.0) -> Optimizer:
        matrices = list(self.transformer.h.parameters())
        tables = [self.transformer.wte.weight, *(e.weight for e in self.value_embeds.values())]
        scalars = [self.resid_lambdas, self.x0_lambdas, self.smear_lambda, self.backout_lambda]
        rest = [*tables, *scalars, self.lm_head.weight, self.smear_gate.weight]
        assert len(list(self.parameters())) == len(matrices) + len(rest)
        groups: list[dict[str, Any]] = [{"kind": "adamw", "params": rest, "lr": 0.01}]
        for shape in sorted({p.shape for p in matrices}):
            same = [p for p in matrices if p.shape == shape]
            groups.append({"kind": "muon", "params": same, "lr": matrix_lr, "momentum": 0.9})
        optimizer = Optimizer(groups)
        for group in optimizer.param_groups:
            group["initial_lr"] = group["lr"]
        return optimizer

    def forward(self, idx: Tensor, targets: Any = None, kv_cache: Any = None) -> Tensor:
        start = 0 if kv_cache is None else kv_cache.get_pos()
        angles = self.angles[start : start + idx.shape[1]].to(DTYPE["compute"])
        cos_sin = angles.cos(), angles.sin()
        x = norm(self.transformer.wte(idx).to(DTYPE["compute"]))
        before = None
        if kv_cache is not None:
            before, kv_cache.prev_embedding = kv_cache.prev_embedding, x[:, -1:]
        gate = self.smear_lambda.to(x.dtype) * torch.sigmoid(self.smear_gate(x[..., :6]))
        first = torch.zeros_like(x[:, :1]) if before is None else before
        x = x + gate * torch.cat((first, x[:, :-1]), dim=1)
        x0, x_backout = x, None
        for i, block in enumerate(self.transformer.h):
            x = self.resid_lambdas[i] * x + self.x0_lambdas[i] * x0
            ve = self.value_embeds[str(i)](idx).to(x.dtype) if str(i) in self.value_embeds else None
            x = block(x, ve, cos_sin, self.windows[i], kv_cache)
            if i == self.config.n_layer // 2:
                x_backout = x
        if x_backout is not None:
            x = x - self.backout_lambda.to(x.dtype) * x_backout
        logits = 15 * torch.tanh(self.lm_head(norm(x)).float() / 15)
        if targets is None:
            return logits
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-1)


class Optimizer(torch.optim.Optimizer):
    """Steps by the sign of the gradient, matrices of one shape stacked, as nanochat's Muon."""

    def __init__(self, groups: list[dict[str, Any]]) -> None:
        super().__init__(groups, {})

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            if group["kind"] == "muon":
                stacked = torch.stack([p.grad for p in group["params"]])
                assert stacked.ndim == 3
                for p, step in zip(group["params"], stacked.sign(), strict=True):
                    p -= group["lr"] * (1 - group["momentum"]) * step
            elif group["kind"] == "adamw":
                for p in group["params"]:
                    p -= group["lr"] * p.grad.sign().to(p.dtype)
            else:
                raise ValueError(group["kind"])


class KVCache:
    """Keys and values (B, T, heads, size) of every layer, with room for `seq_len` tokens."""

    def __init__(self, batch_size: int, seq_len: int, config: GPTConfig) -> None:
        size = config.n_embd // config.n_head
        shape = (config.n_layer, batch_size, seq_len, config.n_head, size)
        self.batch_size, self.n_layers = batch_size, config.n_layer
        self.k_cache, self.v_cache = (torch.zeros(shape, dtype=DTYPE["compute"]) for _ in range(2))
        self.cache_seqlens = torch.zeros(batch_size, dtype=torch.int32)
        self.prev_embedding: Any = None

    def reset(self) -> None:
        self.cache_seqlens.zero_()
        self.prev_embedding = None

    def get_pos(self) -> int:
        return int(self.cache_seqlens[0])

    def extend(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        start = self.get_pos()
        end = start + k.shape[1]
        for cache, new in ((self.k_cache, k), (self.v_cache, v)):
            cache[layer, :, start:end] = new
        if layer == self.n_layers - 1:
            self.cache_seqlens += k.shape[1]
        return self.k_cache[layer, :, :end], self.v_cache[layer, :, :end]

    def prefill(self, other: KVCache) -> None:
        end = other.get_pos()
        self.k_cache[:, :, :end] = other.k_cache[:, :, :end]
        self.v_cache[:, :, :end] = other.v_cache[:, :, :end]
        self.cache_seqlens.fill_(end)
        self.prev_embedding = other.prev_embedding.expand(self.batch_size, -1, -1).clone()
