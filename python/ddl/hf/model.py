"""DDLModel: the decoder of a `ddl.models.GPT`, without its head, with transformers' interface."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutputWithPast
from transformers.utils.generic import can_return_tuple

from ddl.models import GPT
from ddl.models.sublayers import Attention, Rotary, SwiGLU, TimeMixer
from ddl.models.trunk import hidden_states

from .attention import HFAttention, adapted, attend_by, keeps_the_past
from .base import OurDecoder, check_given, check_unset
from .cache import CACHE, CACHE_NAMES, DDLCache, our_cache
from .configuration import DDLConfig
from .packing import check_documents, check_known, mask_of_numbers, starts_of

__all__ = ["DDLDecoder", "DDLModel", "DDLModelOutput"]

# The gate β and value v keep float32 parameters in every model dtype: their biases start around 1,
# where bfloat16 has steps of 1/128, too coarse to train. They are only 1 + m of ~6d rows. The
# maps of mhc and independent-hc stay float32, too, as in the models that they are from, and so do
# the gates of a mixer.
WIDE = [
    r"residuals\.\d+\.gate\.",
    r"residuals\.\d+\.value\.",
    r"connections\.\d+\.(map|base|scale)$",
    r"trunk\.head\.(map|base|scale)$",
    r"\.mixer\.(gate|decay)\.",
]


class HFTimeMixer(GradientCheckpointingLayer, TimeMixer):
    """TimeMixer with activation checkpointing: the backward can recompute activations."""


class HFSwiGLU(GradientCheckpointingLayer, SwiGLU):
    """The MLP with activation checkpointing."""


SUBLAYERS = {Attention: HFAttention, TimeMixer: HFTimeMixer, SwiGLU: HFSwiGLU}


@dataclass
class DDLModelOutput(BaseModelOutputWithPast):
    """Output of `DDLModel`.

    last_hidden_state: (B, T, d), the head's input. document_starts: (B, T) bool, the first token of
    each document as the arguments mark them; None if none does. The rest: as in DDLForCausalLM.
    """

    document_starts: Tensor | None = None


class DDLDecoder(OurDecoder):
    """Base of DDLModel and DDLForCausalLM."""

    config_class = DDLConfig
    made_of = GPT
    config: DDLConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _supports_attention_backend = True
    _keep_in_fp32_modules_strict = WIDE
    # The fused operators read these modules' parameters without calling them, so accelerate's hooks
    # could not move them between devices.
    _no_split_modules = [  # noqa: RUF012
        "AdditiveStream",
        "ConvolvedStream",
        "ConnectedStream",
        "AttentionResidualStream",
        "ExpandedStream",
        "DeltaStream",
    ]
    _skip_keys_device_placement = list(CACHE_NAMES)  # noqa: RUF012

    @torch.no_grad()
    def initialize_weights(self) -> None:
        """Draw the parameters that the checkpoint lacks, and fill the rotary tables."""
        for module in self.modules():
            if isinstance(module, Rotary):
                module.reset_parameters()
        super().initialize_weights()


class DDLModel(DDLDecoder):
    """Embedding and trunk of a model of ddl-rs, with any residual: tokens to the head's input.

    `wte` and `trunk` are those of `ddl.models.GPT`, so state dicts have the same names.

    dtype: in bfloat16 and float16, the rewrite's gates and values keep float32 parameters.
    Attention: by the function that `attn_implementation` names.
    """

    def __init__(self, config: DDLConfig, model: GPT | None = None) -> None:
        """Build a new model, or share the modules of `model`, parameters included."""
        super().__init__(config)
        fresh = model is None
        model = GPT(config.gpt) if model is None else model
        self._gpt_config = model.config
        self.wte, self.trunk = model.wte, model.trunk
        for sublayer in self.trunk.sublayers:
            sublayer.__class__ = SUBLAYERS.get(type(sublayer), type(sublayer))
        attend_by(config, self.trunk.sublayers)
        self._initialized(fresh)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        past_key_values: DDLCache | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        output_hidden_states: bool | None = None,
        output_attentions: bool | None = None,
        document_starts: Tensor | None = None,
        position_ids: Tensor | None = None,
        seq_idx: Tensor | None = None,
        cache: DDLCache | None = None,
        **kwargs: Any,
    ) -> DDLModelOutput:
        """The head's input of each token; the arguments are those of `DDLForCausalLM`.

        An attention function without masks, which a serving engine has registered, gets all
        `kwargs`, and the positions `position_ids` (B, T) or (1, T); it keeps the past itself.

        Raises ValueError if an argument does not fit, TypeError for an unknown one.
        """
        by_engine = keeps_the_past(self.config)
        marks = (document_starts, position_ids, seq_idx, *kwargs.values())
        packed = any(mark is not None for mark in marks)
        longest = None if by_engine or packed else self.config.block_size
        given = check_given(self.config, input_ids, inputs_embeds, longest=longest)
        check_unset(output_attentions or self.config.output_attentions)
        if output_hidden_states is None:
            output_hidden_states = self.config.output_hidden_states
        cache = our_cache(past_key_values=past_key_values, cache=cache)
        if by_engine:
            self._check_engine(cache, attention_mask, document_starts, seq_idx)
            kwargs["position_ids"] = position_ids
        else:
            check_known(kwargs)
            if use_cache and cache is None:
                cache = DDLCache(self._gpt_config)
            attention_mask = mask_of_numbers(attention_mask)
            document_starts = starts_of(
                given,
                attention_mask,
                cache is not None and cache.get_seq_length() > 0,
                document_starts=document_starts,
                position_ids=position_ids,
                seq_idx=seq_idx,
                **kwargs,
            )
            check_documents(document_starts, given.shape[1], self.config.block_size)
        attend_by(self.config, self.trunk.sublayers)
        x = self.wte(input_ids) if inputs_embeds is None else inputs_embeds
        with self._recorded(output_hidden_states) as seen:
            h = hidden_states(
                self.trunk,
                self._gpt_config,
                x,
                attention_mask=attention_mask,
                cache=None if cache is None else cache.cache,
                document_starts=document_starts,
                adapt=lambda tokens: adapted(tokens, self.config, x, attention_mask, kwargs),
            )
        named: dict[str, Any] = {CACHE: cache}
        return DDLModelOutput(
            last_hidden_state=h,
            hidden_states=(*seen, h) if output_hidden_states else None,
            document_starts=document_starts,
            **named,
        )

    def _check_engine(self, cache: Any, *masks: Tensor | None) -> None:
        """Raise ValueError for what an attention function that keeps the past cannot serve."""
        name = self.config._attn_implementation
        by_masks = f'; AttentionMaskInterface.register("{name}", sdpa_mask) gives it masks instead'
        if self._gpt_config.looks_back:
            raise ValueError(
                f'`attn_implementation` must not be "{name}", which keeps keys and values alone: '
                "reads of several tokens, convolutions and mixers need the past of the stream"
                + by_masks
            )
        if self.training:  # documents would see one another
            raise ValueError(
                f'`attn_implementation` must not be "{name}" in training: it has no masks'
                + by_masks
            )
        if cache is not None or any(mask is not None for mask in masks):
            raise ValueError(
                "a cache, `attention_mask`, `document_starts` and `seq_idx` must be left out for "
                f'the attention function "{name}", which keeps the past itself, got one' + by_masks
            )

    @contextmanager
    def _recorded(self, wanted: bool | None) -> Iterator[list[Tensor]]:
        """Yield a list that collects the input of every block's first sublayer."""
        seen: list[Tensor] = []
        first = self.trunk.sublayers[::2] if wanted else ()
        hooks = [
            sublayer.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
            for sublayer in first
        ]
        try:
            yield seen
        finally:
            for hook in hooks:
                hook.remove()
