"""Sublayers, the same for every residual: rotary positions, attention, mixers, the gated MLP."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from ddl.nn.convolution import Slot
from ddl.nn.mixer import DeltaMixer
from ddl.ops.checks import is_distributed

from .config import GPTConfig
from .tokens import ALONE, Tokens

NORM_EPS = 1e-5
HIDDEN_STD_FACTOR = 0.5  # matrices start with std 0.5/√d


class Rotary(nn.Module):
    """Rotary position embedding, rotate-half layout: pairs are (i, i + head_dim/2).

    The tables are float32 and never saved. `.bfloat16()`, `.to_empty()` after construction on the
    meta device, and `.to(device)` would damage them; all go through `_apply`, which recomputes
    them.
    """

    cos: Tensor
    sin: Tensor

    def __init__(self, head_dim: int, length: int, base: float = 10000.0) -> None:
        super().__init__()
        self.head_dim, self.length, self.base = head_dim, length, base
        self.register_buffer("cos", torch.empty(length, head_dim // 2), persistent=False)
        self.register_buffer("sin", torch.empty(length, head_dim // 2), persistent=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Compute the tables, on their current device; outside inference mode, for training."""
        with torch.inference_mode(False), torch.no_grad():
            exact: dict[str, Any] = {"dtype": torch.float32, "device": self.cos.device}
            pairs = torch.arange(0, self.head_dim, 2, **exact)
            # 1/base^x and base^−x differ in the last bit, which position 1000 magnifies to 1e-5.
            # The published models were trained with 1/base^x.
            frequencies = 1.0 / self.base ** (pairs / self.head_dim)
            angles = torch.outer(torch.arange(self.length, **exact), frequencies)
            self.cos, self.sin = angles.cos(), angles.sin()

    def _apply(self, fn: Any, recurse: bool = True) -> Rotary:
        super()._apply(fn, recurse)
        self.reset_parameters()
        return self

    def forward(self, x: Tensor, tokens: Tokens = ALONE) -> Tensor:
        """Rotate x (B, T, H, head_dim) by its positions; returns float32 (float64 for float64)."""
        if self.cos.device != x.device:  # after load_state_dict(assign=True) on a meta model
            self.cos = self.cos.new_empty(0, device=x.device)
            self.reset_parameters()
        consecutive = slice(tokens.start, tokens.start + x.shape[1])
        where = consecutive if tokens.positions is None else tokens.positions
        # No loop over both: torch.compile makes a constant of a length that a generator looks up.
        cos, sin = self.cos[where].unsqueeze(-2), self.sin[where].unsqueeze(-2)
        x1, x2 = wide(x).chunk(2, dim=-1)
        return torch.cat((x1 * cos - x2 * sin, x1 * sin + x2 * cos), dim=-1)


class Attention(nn.Module):
    """Causal multi-head attention; queries and keys are rotated, then normalised (QK-norm).

    layer_idx: index of the block; the cache stores keys and values under it.
    """

    def __init__(self, config: GPTConfig, layer_idx: int) -> None:
        super().__init__()
        self.layer_idx = layer_idx
        d, width = config.hidden_size, config.num_heads * config.head_dim
        self.head_dim = config.head_dim
        self.c_q = nn.Linear(d, width, bias=False)
        self.c_k = nn.Linear(d, width, bias=False)
        self.c_v = nn.Linear(d, width, bias=False)
        self.c_proj = nn.Linear(width, d, bias=False)
        self.q_rms = nn.RMSNorm(self.head_dim, eps=NORM_EPS)
        self.k_rms = nn.RMSNorm(self.head_dim, eps=NORM_EPS)
        self.rotary = Rotary(self.head_dim, config.block_size, config.rope_base)

    def forward(self, h: Tensor, tokens: Tokens = ALONE) -> Tensor:
        """Map h (B, T, d) to (B, T, d). tokens: their positions, mask and cache."""
        q, k, v = (self._heads(c(h)) for c in (self.c_q, self.c_k, self.c_v))  # (B, T, H, head_dim)
        # Rotate in float32, normalise in the norm's dtype (float32 under autocast), and attend in
        # the dtype of the matrix products.
        norm_dtype = self.q_rms.weight.dtype
        q = self._normed(self.q_rms, self.rotary(q, tokens).to(norm_dtype))
        k = self._normed(self.k_rms, self.rotary(k, tokens).to(norm_dtype))
        q, k, v = (x.to(v.dtype).transpose(1, 2) for x in (q, k, v))
        if tokens.cache is not None:
            k, v = tokens.cache.extend(self.layer_idx, k, v)  # (B, H, start + T, head_dim)
        return self.c_proj(self.attend(q, k, v, tokens).flatten(2))

    def attend(self, q: Tensor, k: Tensor, v: Tensor, tokens: Tokens) -> Tensor:
        """Map q (B, H, T, head_dim), k and v (B, H, start + T, head_dim) to (B, T, H, head_dim)."""
        y = F.scaled_dot_product_attention(
            q, k, v, attn_mask=tokens.visible, is_causal=tokens.causal
        )
        return y.transpose(1, 2)

    def _heads(self, x: Tensor) -> Tensor:
        """Split the features of a projection; a tensor parallel process has some of the heads."""
        heads, left = divmod(x.shape[-1], self.head_dim)
        if left:
            raise ValueError(
                f"`c_q` must have whole heads of {self.head_dim} features in each tensor parallel "
                f"process, got {x.shape[-1]} features"
            )
        return x.view(*x.shape[:-1], heads, self.head_dim)

    def _normed(self, norm: nn.RMSNorm, x: Tensor) -> Tensor:
        """Normalise heads; in tensor parallel training, sum the weight's gradient over them all."""
        query: Any = getattr(self.c_q, "weight", None)
        if not (torch.is_grad_enabled() and is_distributed(query)):
            return norm(x)
        from torch.distributed.tensor import DTensor, Partial, Replicate

        whole = DTensor.from_local(norm.weight, query.device_mesh, [Replicate()], run_check=False)
        weight = whole.to_local(grad_placements=[Partial()])
        return functional_call(norm, {"weight": weight}, (x,))


class TimeMixer(nn.Module):
    """The delta rule over time in attention's place, as `config.mixer` names it.

    layer: index of the block; the cache stores states under it.
    """

    def __init__(self, config: GPTConfig, layer: int) -> None:
        super().__init__()
        self.layer = layer
        assert config.mixer != "attention", "a layer of config.mixing_layers"
        self.mixer = DeltaMixer(
            config.hidden_size,
            config.num_heads,
            kind=config.mixer,
            n=config.mixer_n,
            gated=config.mixer_gated,
            head_size=config.head_dim,
            norm_eps=NORM_EPS,
        )

    def forward(self, h: Tensor, tokens: Tokens = ALONE) -> Tensor:
        """Map h (B, T, d) to (B, T, d). tokens: their padding, documents and cache."""
        slot = None if tokens.cache is None else Slot(tokens.cache.history, f"layers.{self.layer}")
        y: Tensor = self.mixer(
            h, keep=tokens.keep, document_starts=tokens.document_starts, slot=slot
        )
        return y


class SwiGLU(nn.Module):
    """The gated MLP (silu(h W₁)·(h W₂)) W₃, of hidden width `config.mlp_hidden`."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.c_fc1 = nn.Linear(config.hidden_size, config.mlp_hidden, bias=False)
        self.c_fc2 = nn.Linear(config.hidden_size, config.mlp_hidden, bias=False)
        self.c_proj = nn.Linear(config.mlp_hidden, config.hidden_size, bias=False)

    def forward(self, h: Tensor, tokens: Tokens = ALONE) -> Tensor:
        """Map h (B, T, d) to (B, T, d), each token by itself; `tokens` is ignored."""
        return self.c_proj(F.silu(self.c_fc1(h)) * self.c_fc2(h))


def wide(x: Tensor) -> Tensor:
    """Convert x to float32; leave float64."""
    return x if x.dtype == torch.float64 else x.float()
