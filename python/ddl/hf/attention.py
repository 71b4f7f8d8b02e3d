"""Attention by transformers' registry: `attn_implementation` of our own models.

The functions of the registry get queries, keys and values (B, H, T, head_dim) and return
(B, T, H, head_dim). Their masks differ; `adapted` brings ours into the form of each:

    eager, sdpa              (B, 1, T, start + T) bool, or `is_causal`
    flex_attention           a BlockMask
    flash_attention_2, …     (B, start + T), 0 for padding; cumulated lengths for documents
    any other                none: it gets the caller's keyword arguments, and keeps the past itself
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask, create_block_mask
from transformers.masking_utils import (
    ALL_MASK_ATTENTION_FUNCTIONS,
    causal_mask_function,
    flash_attention_mask,
    flex_attention_mask,
    sdpa_mask,
)
from transformers.modeling_flash_attention_utils import prepare_fa_kwargs_from_position_ids
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ddl.models.nanogpt import MLP, CausalSelfAttention
from ddl.models.sublayers import Attention, SwiGLU, TimeMixer, wide
from ddl.models.tokens import Tokens


class ByRegistry:
    """Mixin: the attributes that the registry's functions read from a module of attention.

    config: the model's, which names the function.
    """

    config: Any = None
    is_causal = True
    num_key_value_groups = 1

    def by_registry(self, q: Tensor, k: Tensor, v: Tensor, mask: Any, **kwargs: Any) -> Tensor:
        """Map q, k and v (B, H, T, head_dim) to (B, T, H, head_dim)."""
        name = self.config._attn_implementation
        attention: Any = ALL_ATTENTION_FUNCTIONS.get_interface(name, eager_attention)
        y: Tensor = attention(self, q, k, v, mask, scaling=1 / math.sqrt(q.shape[-1]), **kwargs)[0]
        return y.reshape(q.transpose(1, 2).shape)  # an engine's may be (tokens, H * head_dim)


class HFAttention(GradientCheckpointingLayer, ByRegistry, Attention):
    """Attention by a function of the registry, with activation checkpointing."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, tokens: Tokens) -> Tensor:
        if tokens.attention is None:  # in the pass of a GPT that shares this module
            return super().attend(q, k, v, tokens)
        kwargs = {"is_causal": tokens.causal, **tokens.attention}
        return self.by_registry(q, k, v, tokens.visible, **kwargs)


class HFCausalSelfAttention(GradientCheckpointingLayer, ByRegistry, CausalSelfAttention):
    """nanoGPT's attention by a function of the registry, with activation checkpointing."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        flex = mask_function(self.config) is flex_attention_mask
        mask = _causal_blocks(q.shape[2], q.device) if flex else None
        dropout = self.dropout if self.training else 0.0
        return self.by_registry(q, k, v, mask, dropout=dropout, is_causal=True)


class HFTimeMixer(GradientCheckpointingLayer, TimeMixer):
    """TimeMixer with activation checkpointing."""


class HFSwiGLU(GradientCheckpointingLayer, SwiGLU):
    """The MLP with activation checkpointing."""


class HFMLP(GradientCheckpointingLayer, MLP):
    """nanoGPT's MLP with activation checkpointing."""


# The classes of sublayers of `ddl.models`, and those that they become in a model of transformers.
SUBLAYERS: dict[type, type] = {
    Attention: HFAttention,
    TimeMixer: HFTimeMixer,
    SwiGLU: HFSwiGLU,
    CausalSelfAttention: HFCausalSelfAttention,
    MLP: HFMLP,
}


def eager_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float,
    dropout: float = 0.0,
    is_causal: bool = False,
    **_: Any,
) -> tuple[Tensor, Tensor]:
    """Attention as three operations, with the softmax in float32; the registry's "eager"."""
    scores = wide(query @ key.transpose(2, 3) * scaling)
    if is_causal:
        attention_mask = torch.ones(scores.shape[2:], dtype=torch.bool, device=key.device).tril()
    if attention_mask is not None:
        scores = scores.masked_fill(~attention_mask, -math.inf)
    weights = F.dropout(scores.softmax(-1).to(query.dtype), dropout, module.training)
    return (weights @ value).transpose(1, 2), weights


def mask_function(config: Any) -> Any:
    """The function of masks that belongs to a model's attention function; None if there is none.

    Serving engines register an attention function alone, which keeps keys and values. transformers
    gives it no mask then. Raises ValueError for a function whose masks have a form of their own.
    """
    name = config._attn_implementation
    function = ALL_MASK_ATTENTION_FUNCTIONS.get(name)
    known = (sdpa_mask, flash_attention_mask, flex_attention_mask)
    if name != "eager" and function not in (None, *known):
        expected = ", ".join(each.__name__ for each in known)
        got = getattr(function, "__name__", function)
        raise ValueError(f'the masks of "{name}" must be those of {expected}, got {got}')
    return function


def adapted(
    tokens: Tokens, config: Any, x: Tensor, mask: Tensor | None, given: Mapping[str, Any]
) -> Tokens:
    """Return the tokens with the mask that the model's attention function understands.

    x: (B, T, d), their embeddings. mask: (B, start + T), the `attention_mask` of the pass. given:
    the caller's arguments for a function that keeps the past; `position_ids` among them, (B, T) or
    (1, T), are the positions.
    Raises ValueError for documents that flash attention cannot keep apart.
    """
    function, tokens = mask_function(config), tokens._replace(attention={})
    if function is None:
        return Tokens(positions=given.get("position_ids"), attention=given)
    if function is flash_attention_mask:
        return _for_flash(tokens, mask)
    if function is flex_attention_mask:
        return tokens._replace(visible=_blocks(tokens, x.shape[1], x.device), causal=False)
    return tokens


def _for_flash(tokens: Tokens, mask: Tensor | None) -> Tokens:
    """The function is causal by itself, aligned to the last key; it has no mask of documents."""
    hides = mask is not None and not bool(mask.all())
    if tokens.begins is None:
        return tokens._replace(visible=mask if hides else None, causal=True)
    if hides or tokens.start > 0 or tokens.document_starts is None:
        rest = "padding" if hides else "tokens in the cache"
        raise ValueError(
            "`document_starts` must come without padding and with an empty cache for flash "
            f'attention, got {rest}: load with attn_implementation="sdpa"'
        )
    ends, longest = prepare_fa_kwargs_from_position_ids(tokens.positions)
    lengths = {"cu_seq_lens_q": ends[0], "max_length_q": int(longest[0])}
    lengths |= {"cu_seq_lens_k": ends[1], "max_length_k": int(longest[1])}
    return tokens._replace(visible=None, causal=True, attention=lengths)


def _blocks(tokens: Tokens, length: int, device: torch.device) -> BlockMask | None:
    """The mask of flex attention for `length` tokens; None if each sees all keys."""
    if tokens.causal:
        return _causal_blocks(length, device)
    if tokens.visible is None:
        return None
    visible: Tensor = tokens.visible
    visible = visible if visible.ndim == 4 else visible[None, None]  # (B or 1, 1, T, start + T)
    batch, _, queries, keys = visible.shape

    def seen(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return visible[b, 0, q, k]

    return create_block_mask(seen, batch, None, queries, keys, device=device)


@lru_cache(maxsize=8)
def _causal_blocks(length: int, device: torch.device) -> BlockMask:
    causal: Any = causal_mask_function
    with torch.inference_mode(False):  # a training step may be the next to use it
        return create_block_mask(causal, None, None, length, length, device=device)
