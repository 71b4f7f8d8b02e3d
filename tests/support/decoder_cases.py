"""Small decoders of transformers, their conversions, and the equations written out."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor

from ddl import hf
from ddl.nanogpt.annealing import Annealing
from tests.support.helpers import randomise_
from tests.support.hf_cases import VOCABULARY

SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "Llama": {},
    "Mistral": {"sliding_window": 6},
    "Qwen2": {},
    "Qwen3": {"head_dim": 8},
    "SmolLM3": {},
    "Phi3": {},
    "GPT2": {"n_inner": 48},
    "Mixtral": {"num_local_experts": 2},
}
VARIANTS: dict[str, dict[str, Any]] = {
    "scalar": {"start": None},
    "channel": {"value_channels": 4, "start": None},
    "token and conv": {
        "value_channels": 2, "compress": "token", "expand": "conv", "start": None,
    },
    "raw": {"value_channels": 2, "value_from": "compressed", "start": None},
    "convolved gate": {"gate_from": "convolved", "gate": "mlp", "gate_hidden": 5, "start": None},
    "v-Map": {"value_channels": 2, "mapping": "v", "start": None},
    "write-only": {"value_channels": 2, "erase": "none", "branch_scale": 0.7, "start": None},
    "annealed": {"value_channels": 2, "compress": "token", "anneal_steps": 4},
    "adapter": {"value_channels": 2, "compress": "token", "train": "stream"},
    "adapter, pooled": {"value_channels": 2, "gate_from": "pooled", "train": "stream"},
}  # fmt: skip


def plain(family: str = "Llama", **options: Any) -> Any:
    """A model of a family as transformers makes it, in evaluation mode."""
    config = getattr(transformers, f"{family}Config")(**{**SIZES, **FAMILIES[family], **options})
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(config).eval()


def converted(variant: str, family: str = "Llama", **options: Any) -> Any:
    """A converted model of a family, all of whose parameters are random."""
    model = hf.convert(plain(family, **options), **VARIANTS[variant])
    randomise_(model)
    for module in model.modules():
        if isinstance(module, Annealing):
            module.step.fill_(1)
    return model


def tokens(batch: int = 2, time: int = 9, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCABULARY, (batch, time), generator=generator)


def written_out(model: Any, idx: Tensor, share: float | None = None) -> Tensor:
    """The logits of a converted Llama, one Read and one DeltaResidual after the other.

    share: a, of a model that is annealed.
    """
    decoder = model.model
    x = decoder.embed_tokens(idx)
    positions = torch.arange(idx.shape[1])[None]
    given = {"position_embeddings": decoder.rotary_emb(x, position_ids=positions)}
    X = decoder.layers[0].expand(x)
    for layer in decoder.layers:
        _, raw = layer.read_1(X, return_compressed=True)
        h = layer.input_layernorm(raw)
        written = layer.self_attn(hidden_states=h, attention_mask=None, **given)[0]
        X = rewritten(layer, 1, X, written, h, raw, share)
        _, raw = layer.read_2(X, return_compressed=True)
        h = layer.post_attention_layernorm(raw)
        X = rewritten(layer, 2, X, layer.mlp(h), h, raw, share)
    _, raw = decoder.norm.readout(X, return_compressed=True)
    logits: Tensor = model.lm_head(decoder.norm(raw))
    return logits


def rewritten(
    layer: Any, which: int, X: Tensor, F: Tensor, h: Tensor, raw: Tensor, share: float | None
) -> Tensor:
    """X after one sublayer: Δ(X), or (1 − a) F 1ᵀ + a Δ(X), or s Δ(X + F 1ᵀ) of an adapter."""
    residual = getattr(layer, f"res_{which}")
    wide = F if X.ndim == F.ndim else F.unsqueeze(-1)
    if hasattr(layer, f"scale_{which}"):
        Y = X + wide
        change = residual(Y, F, context=h, compressed=raw) - Y
        return Y + getattr(layer, f"scale_{which}").weight * change
    change = residual(X, F, context=h, compressed=raw) - X
    return X + change if share is None else X + (1 - share) * wide + share * change


def loss_of(logits: Tensor, idx: Tensor) -> Tensor:
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), idx[:, 1:].flatten())
