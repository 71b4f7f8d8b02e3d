"""The published model of Deep Delta Learning in plain PyTorch, for the tests of `ddl.paper`.

It is written from the papers' formulas and the published parameter names. It shares no operator,
module or option name with ddl. `forward` follows the paper line by line, with torch's convolutions.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

DEFAULTS = {
    "vocab_size": 50304,
    "num_hidden_layers": 12,
    "num_attention_heads": 6,
    "hidden_size": 768,
    "head_dim": 128,
    "block_size": 1024,
    "rope_base": 10000.0,
    "ddl_k_eps": 1e-5,
    "ddl_beta_single_linear": True,
    "ddl_beta_hidden_size": 128,
    "ddl_beta_init": 1.0,
    "ddl_v_sigmoid": True,
    "ddl_v_sigmoid_scale": 4.0,
    "ddl_v_constant": False,
    "ddl_v_constant_value": 2.0,
    "ddl_v_dim1_constant": False,
    "ddl_v_dim1_constant_value": 2.0,
    "ddl_value_channels": 4,
    "ddl_state_shortconv_kernel_size": 4,
    "ddl_state_dv_shortconv_causal": False,
    "input_embed_shortconv_kernel_size": 4,
    "residual_branch_mult": 1.0,
    "parameterization": None,
    "hidden_size_base": 1024,
    "num_hidden_layers_base": 12,
}

# Small enough for hundreds of tests.
SIZES: dict[str, Any] = {
    "vocab_size": 61,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "hidden_size": 24,
    "head_dim": 12,
    "block_size": 24,
}


class Options:
    """A config.json; missing fields have the published defaults."""

    def __init__(self, **given: Any) -> None:
        self.given = given

    def __getattr__(self, name: str) -> Any:
        return self.given.get(name, DEFAULTS[name])


class RMSNorm(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x: Tensor) -> Tensor:
        return x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * self.weight


class Attention(nn.Module):
    def __init__(self, o: Options) -> None:
        super().__init__()
        self.o, width = o, o.num_attention_heads * o.head_dim
        self.c_q = nn.Linear(o.hidden_size, width, bias=False)
        self.c_k = nn.Linear(o.hidden_size, width, bias=False)
        self.c_v = nn.Linear(o.hidden_size, width, bias=False)
        self.c_proj = nn.Linear(width, o.hidden_size, bias=False)
        self.q_rms, self.k_rms = RMSNorm(o.head_dim), RMSNorm(o.head_dim)

    def rotate(self, x: Tensor) -> Tensor:
        """x (B, T, H, head_dim): rotate the pair (i, i + head_dim/2) by t/base^(2i/head_dim)."""
        half = self.o.head_dim // 2
        exponent = torch.arange(0, 2 * half, 2).float() / self.o.head_dim
        frequency = 1.0 / (self.o.rope_base**exponent)
        angle = torch.arange(x.shape[1]).float()[:, None] * frequency  # (T, half), float32 always
        cos, sin = angle.cos()[:, None], angle.sin()[:, None]
        left, right = x[..., :half], x[..., half:]
        return torch.cat((left * cos - right * sin, right * cos + left * sin), dim=-1)

    def forward(self, h: Tensor) -> Tensor:
        T = h.shape[1]
        q, k, v = (
            c(h).unflatten(-1, (-1, self.o.head_dim)) for c in (self.c_q, self.c_k, self.c_v)
        )
        q, k = self.q_rms(self.rotate(q)), self.k_rms(self.rotate(k))
        scores = torch.einsum("bthc,bshc->bhts", q, k) / math.sqrt(self.o.head_dim)
        future = torch.ones(T, T, dtype=torch.bool).triu(1)
        attention = scores.masked_fill(future, -math.inf).softmax(-1)
        return self.c_proj(torch.einsum("bhts,bshc->bthc", attention, v).flatten(2))


class MLP(nn.Module):
    def __init__(self, o: Options) -> None:
        super().__init__()
        hidden = math.floor(8 * o.hidden_size / 3)
        self.c_fc1 = nn.Linear(o.hidden_size, hidden, bias=False)
        self.c_fc2 = nn.Linear(o.hidden_size, hidden, bias=False)
        self.c_proj = nn.Linear(hidden, o.hidden_size, bias=False)

    def forward(self, h: Tensor) -> Tensor:
        return self.c_proj(F.silu(self.c_fc1(h)) * self.c_fc2(h))


class Delta(nn.Module):
    """X ← X + β k̂ (vᵀ − k̂ᵀX), for a state (B, T, d, m)."""

    def __init__(self, o: Options, channels: int) -> None:
        super().__init__()
        self.o, self.channels = o, channels
        if o.ddl_beta_single_linear:
            self.beta = nn.Linear(o.hidden_size, 1)
        else:
            self.beta_in = nn.Linear(o.hidden_size, o.ddl_beta_hidden_size, bias=False)
            self.beta_out = nn.Linear(o.ddl_beta_hidden_size, 1)
        self.v_proj = nn.Linear(o.hidden_size, channels)

    def value(self, raw: Tensor) -> Tensor:
        kind = "dim1_constant" if self.channels == 1 else "constant"
        if getattr(self.o, f"ddl_v_{kind}"):
            constant = getattr(self.o, f"ddl_v_{kind}_value")
            return raw.new_full((*raw.shape[:-1], self.channels), constant)
        v = self.v_proj(raw)
        return self.o.ddl_v_sigmoid_scale * torch.sigmoid(v) if self.o.ddl_v_sigmoid else v

    def forward(self, X: Tensor, k: Tensor, raw: Tensor, context: Tensor) -> Tensor:
        if self.o.ddl_beta_single_linear:
            logit = self.beta(context)
        else:
            logit = self.beta_out(torch.tanh(self.beta_in(context)))
        beta = 2 * torch.sigmoid(logit)[..., None]  # (B, T, 1, 1)
        # The published form: RMSNorm(k; ε_k²/d)/√d.
        d = k.shape[-1]
        k = k / (k.square().mean(-1, keepdim=True) + self.o.ddl_k_eps**2 / d).sqrt() / math.sqrt(d)
        k = k[..., None]  # (B, T, d, 1)
        v = self.value(raw)[..., None, :]  # (B, T, 1, m)
        scale = self.o.residual_branch_mult
        if scale is None:  # completeP
            scale = self.o.num_hidden_layers_base / self.o.num_hidden_layers
        return X + scale * (beta * k * (v - k.mT @ X))


class TokenCompressor(nn.Module):
    """A depthwise causal convolution over time of all d·m elements, then the read vector."""

    def __init__(self, o: Options) -> None:
        super().__init__()
        self.o = o
        rows, taps = o.hidden_size * o.ddl_value_channels, o.ddl_state_shortconv_kernel_size
        self.shortconv = nn.Module()
        self.shortconv.weight = nn.Parameter(torch.randn(rows, taps))
        self.read = nn.Parameter(torch.randn(o.ddl_value_channels))

    def forward(self, X: Tensor) -> Tensor:
        weight = self.shortconv.weight[:, None]
        rows = F.pad(X.flatten(2).mT, (weight.shape[-1] - 1, 0))  # (B, d·m, T + K − 1)
        rows = F.conv1d(rows, weight, groups=len(weight))
        return rows.mT.unflatten(-1, X.shape[2:]) @ self.read


class ChannelCompressor(nn.Module):
    """A same-padded depthwise convolution over the value axis, then the read vector."""

    def __init__(self, o: Options) -> None:
        super().__init__()
        self.o = o
        taps = o.ddl_state_shortconv_kernel_size
        self.weight = nn.Parameter(torch.randn(o.hidden_size, taps))
        self.read = nn.Parameter(torch.randn(o.ddl_value_channels))

    def forward(self, X: Tensor) -> Tensor:
        taps = self.weight.shape[-1]
        left = taps - 1 if self.o.ddl_state_dv_shortconv_causal else (taps - 1) // 2
        rows = F.pad(X.flatten(0, 1), (left, taps - 1 - left))  # (B·T, d, m + K − 1)
        rows = F.conv1d(rows, self.weight[:, None], groups=X.shape[2])
        return rows.unflatten(0, X.shape[:2]) @ self.read


class Scalar(nn.Module):
    """d_v = 1: nothing to compress."""

    def forward(self, X: Tensor) -> Tensor:
        return X[..., 0]


class InputEmbedding(nn.Module):
    """EC: a depthwise causal convolution over time from d to d·m elements."""

    def __init__(self, o: Options) -> None:
        super().__init__()
        self.conv = nn.Conv1d(
            o.hidden_size,
            o.hidden_size * o.ddl_value_channels,
            o.input_embed_shortconv_kernel_size,
            groups=o.hidden_size,
            bias=False,
        )

    def forward(self, x: Tensor) -> Tensor:
        taps = self.conv.kernel_size[0]
        y = self.conv(F.pad(x.mT, (taps - 1, 0))).mT  # (B, T, d·m)
        return y.unflatten(-1, (x.shape[-1], -1))


COMPRESSORS = {"ddl": Scalar, "tc": TokenCompressor, "cc": ChannelCompressor}


class Block(nn.Module):
    def __init__(self, o: Options, compressor: str) -> None:
        super().__init__()
        channels = 1 if compressor == "ddl" else o.ddl_value_channels
        self.compress = COMPRESSORS[compressor](o) if compressor != "ddl" else Scalar()
        self.attn, self.mlp = Attention(o), MLP(o)
        self.ddl_attn, self.ddl_mlp = Delta(o, channels), Delta(o, channels)
        self.ln_1, self.ln_2 = RMSNorm(o.hidden_size), RMSNorm(o.hidden_size)

    def forward(self, X: Tensor) -> Tensor:
        for norm, sublayer, delta in (
            (self.ln_1, self.attn, self.ddl_attn),
            (self.ln_2, self.mlp, self.ddl_mlp),
        ):
            raw = self.compress(X)
            context = norm(raw)
            X = delta(X, sublayer(context), raw, context)
        return X


class AdditiveBlock(nn.Module):
    """The baseline."""

    def __init__(self, o: Options) -> None:
        super().__init__()
        self.attn, self.mlp = Attention(o), MLP(o)
        self.ln_1, self.ln_2 = RMSNorm(o.hidden_size), RMSNorm(o.hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class PublishedGPT(nn.Module):
    """variant: "additive", "ddl" (d_v = 1), "tc", "tc-ec", "cc" or "cc-ec"."""

    def __init__(self, variant: str, **options: Any) -> None:
        super().__init__()
        o = Options(**options)
        self.variant, self.config = variant, dict(options)
        self.logits_scale = o.hidden_size_base / o.hidden_size if o.parameterization else 1.0
        kind = variant.removesuffix("-ec")
        self.channels = o.ddl_value_channels if kind in ("tc", "cc") else 1
        blocks = [
            AdditiveBlock(o) if kind == "additive" else Block(o, kind)
            for _ in range(o.num_hidden_layers)
        ]
        wte = nn.Embedding(o.vocab_size, o.hidden_size)
        self.transformer = nn.ModuleDict({"wte": wte, "h": nn.ModuleList(blocks)})
        if variant.endswith("-ec"):
            self.input_embed = InputEmbedding(o)
        if kind != "additive":
            self.readout = COMPRESSORS[kind](o) if kind != "ddl" else Scalar()
        self.lm_head = nn.Linear(o.hidden_size, o.vocab_size, bias=False)
        self.lm_head.weight = wte.weight
        self.ln_f = RMSNorm(o.hidden_size)

    @torch.no_grad()
    def randomise_(self, seed: int = 0) -> PublishedGPT:
        """Randomise every parameter, so that none keeps an initial zero or one."""
        g = torch.Generator().manual_seed(seed)
        for name, parameter in self.named_parameters():
            noise = torch.randn(parameter.shape, generator=g)
            if name.endswith(("rms.weight", "ln_1.weight", "ln_2.weight", "ln_f.weight")):
                parameter.copy_(1 + 0.3 * noise)
            else:
                fan_in = parameter.shape[-1] if parameter.ndim > 1 else 1
                parameter.copy_(noise / math.sqrt(fan_in))
        return self

    @torch.no_grad()
    def forward(self, idx: Tensor) -> Tensor:
        """idx (B, T) → logits (B, T, vocab_size)."""
        x = self.transformer.wte(idx)
        if self.variant == "additive":
            for block in self.transformer.h:
                x = block(x)
            return self.lm_head(self.ln_f(x))
        if self.variant.endswith("-ec"):
            X = self.input_embed(x)
        else:
            X = x[..., None].expand(*x.shape, self.channels)
        for block in self.transformer.h:
            X = block(X)
        return self.lm_head(self.ln_f(self.readout(X))) * self.logits_scale


def published(variant: str, **options: Any) -> PublishedGPT:
    """A small published model with random parameters."""
    return PublishedGPT(variant, **(SIZES | options)).randomise_()
