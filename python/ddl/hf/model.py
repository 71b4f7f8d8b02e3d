"""DDLModel: the decoder of a `ddl.models.GPT`, without its head, with transformers' interface."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_outputs import BaseModelOutputWithPast
from transformers.utils.generic import can_return_tuple

from ddl.models import GPT
from ddl.models.sublayers import Rotary
from ddl.models.trunk import Trunk, hidden_states

from .attention import adapted, keeps_the_past
from .base import OurBase, OurDecoder, check_given, check_no_attentions
from .cache import CACHE, CACHE_NAMES, DDLCache, our_cache
from .configuration import DDLConfig
from .packing import check_documents, check_known, mask_of_numbers, starts_of

__all__ = ["DDLBase", "DDLModel", "DDLModelOutput"]

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


@dataclass
class DDLModelOutput(BaseModelOutputWithPast):
    """Output of `DDLModel`.

    last_hidden_state: (B, T, d), the head's input. document_starts: (B, T) bool, the first token of
    each document as the arguments mark them; None if none does. The rest: as in DDLForCausalLM.
    """

    document_starts: Tensor | None = None


class DDLBase(OurBase):
    """Base of DDLModel and DDLForCausalLM."""

    config_class = DDLConfig
    made_of = GPT
    config: DDLConfig
    base_model_prefix = "model"
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


class DDLModel(OurDecoder, DDLBase):
    """Embedding and trunk of a model of ddl-rs, with any residual: tokens to the head's input.

    `wte` and `trunk` are those of `ddl.models.GPT`, so state dicts have the same names.

    dtype: in bfloat16 and float16, the rewrite's gates and values keep float32 parameters.
    Attention: by the function that `attn_implementation` names.
    """

    wte: nn.Embedding
    trunk: Trunk

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
        check_no_attentions(self.config, output_attentions)
        if output_hidden_states is None:
            output_hidden_states = self.config.output_hidden_states
        cache = our_cache(cache if past_key_values is None else past_key_values)
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
        self._attend()
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

    def _check_engine(self, *past_and_masks: Any) -> None:
        """Raise ValueError if an attention function that keeps the past cannot serve the model."""
        if self._gpt_config.looks_back:
            why = (
                ", which keeps keys and values alone: reads of several tokens, convolutions and "
                "mixers need the past of the stream"
            )
        elif self.training or any(given is not None for given in past_and_masks):
            why = (
                " in training, nor with a cache, `attention_mask`, `document_starts` or `seq_idx`: "
                "it keeps the past itself, and has no masks"
            )
        else:
            return
        name = self.config._attn_implementation
        raise ValueError(
            f'`attn_implementation` must not be "{name}"{why}; '
            f'AttentionMaskInterface.register("{name}", sdpa_mask) gives it masks instead'
        )

    @contextmanager
    def _recorded(self, wanted: bool | None) -> Iterator[list[Tensor]]:
        """Yield a list that collects the input of every block's first sublayer."""
        seen: list[Tensor] = []
        hooks = [
            sublayer.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
            for sublayer in (self.trunk.sublayers[::2] if wanted else ())
        ]
        try:
            yield seen
        finally:
            for hook in hooks:
                hook.remove()
