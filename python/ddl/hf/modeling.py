"""DDLModel and DDLForCausalLM: the models of `ddl.models` with Hugging Face's interface."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import GenerationConfig
from transformers.modeling_outputs import BaseModelOutputWithPast
from transformers.utils.generic import can_return_tuple

from ddl.models import GPT, NanoGPT
from ddl.models.scaling import learning_rate_scales
from ddl.models.trunk import Trunk, hidden_states, read_out
from ddl.ops.checks import check_mask

from .attention import adapted, mask_function
from .base import OurBase, OurDecoder, OurModel, check_given, check_no_attentions
from .cache import CACHE, CACHE_NAMES, DDLCache, cache_in, our_cache
from .configuration import DDLConfig
from .nanogpt import DDLNanoGPTForCausalLM
from .packing import check_documents, check_known, mask_of_numbers, starts_of

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
        by_engine = mask_function(self.config) is None  # its attention keeps the past itself
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
        inputs: list[Tensor] = []  # of every block's first sublayer
        hooks = [
            sublayer.register_forward_pre_hook(lambda _, args: inputs.append(args[0]))
            for sublayer in (self.trunk.sublayers[::2] if output_hidden_states else ())
        ]
        try:
            h = hidden_states(
                self.trunk,
                self._gpt_config,
                x,
                attention_mask=attention_mask,
                cache=None if cache is None else cache.cache,
                document_starts=document_starts,
                adapt=lambda tokens: adapted(tokens, self.config, x, attention_mask, kwargs),
            )
        finally:
            for hook in hooks:
                hook.remove()
        named: dict[str, Any] = {CACHE: cache}
        return DDLModelOutput(
            last_hidden_state=h,
            hidden_states=(*inputs, h) if output_hidden_states else None,
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


class DDLForCausalLM(OurModel, DDLBase):
    """A language model with any residual of ddl-rs: `model`, a DDLModel, and the tied `lm_head`.

    Logits are those of `ddl.models.GPT`, bit for bit; its parameters' names follow `model.` here.
    `ddl.hf.from_gpt` converts a GPT.

    Generation: greedy, sampling and beam search, with `DDLCache` as the only cache.
    Gradient checkpointing: the backward recomputes the sublayers' activations.
    Parallelism: `device_map` keeps the whole trunk on one device.
    """

    decoder_class = DDLModel
    model: DDLModel
    _tied_weights_keys = {"lm_head.weight": "model.wte.weight"}  # noqa: RUF012

    def learning_rate_scales(self) -> Iterator[tuple[nn.Parameter, float, float]]:
        """Factors of learning rates, as `GPT.learning_rate_scales`, for `ddl.optim`."""
        return learning_rate_scales(self.model._gpt_config, self.model, GPT)

    def logits_of_state(self, state: Tensor) -> Tensor:
        """Map a state X (B, T, d, m) of the stream to logits (B, T, V), as after the last sublayer.

        For one value channel, and for the additive residual, the state is (B, T, d, 1).
        """
        model: Any = self.model
        logits: Tensor = self.lm_head(read_out(model.trunk, model._gpt_config, state))
        return logits

    # --- generation -------------------------------------------------------------------------------

    def _prepare_cache_for_generation(
        self,
        generation_config: GenerationConfig,
        model_kwargs: dict[str, Any],
        *args: Any,
        **kwargs: Any,
    ) -> bool:
        """Add a `DDLCache` to the model's arguments; raise ValueError for other kinds of cache."""
        kind = generation_config.cache_implementation
        if kind not in (None, "dynamic"):
            raise ValueError(
                f"`cache_implementation` must be left out, got {kind!r}: a DDL model's own cache "
                "also holds what its convolutions and mixers have seen"
            )
        # One more than block_size, because the model never reads the last new token. Without
        # attention there are no positions, and states take the same memory after any number.
        most, length = self.config.block_size + 1, generation_config.max_length
        limited = self.model._gpt_config.attends or not generation_config.use_cache
        if length is not None and length > most and limited:
            expected = f"prompt and new tokens within {most}, the context and one more"
            raise ValueError(f"`max_new_tokens` must keep {expected}, got {length} in all")
        if generation_config.use_cache and cache_in(model_kwargs) is None:
            model_kwargs[CACHE] = DDLCache(self.model._gpt_config)
        return True

    def prepare_inputs_for_generation(  # type: ignore[override]
        self,
        input_ids: Tensor,
        next_sequence_length: int | None = None,
        inputs_embeds: Tensor | None = None,  # by name, or transformers would not pass it on
        **kwargs: Any,
    ) -> dict[str, Any]:
        """Raise ValueError if the cache has the whole prompt: it would be read a second time."""
        if next_sequence_length is not None and next_sequence_length < 1:
            seen = cache_in(kwargs).get_seq_length()
            got = seen + next_sequence_length
            expected = f"go on from the {seen} tokens in `{CACHE}`"
            raise ValueError(f"`input_ids` must {expected}, got {got}")
        kwargs |= {"next_sequence_length": next_sequence_length, "inputs_embeds": inputs_embeds}
        inputs = self._inputs_of_a_step(input_ids, **kwargs)
        cache = cache_in(inputs)
        goes_on = not kwargs.get("is_first_iteration") and cache is not None
        if kwargs.get("position_ids") is None or goes_on:
            inputs.pop("position_ids", None)
        starts = inputs.get("document_starts")
        if starts is not None:  # those of the tokens that are given now; new ones start none
            embeds = inputs.get("inputs_embeds")
            given = inputs["input_ids"] if embeds is None else embeds
            new, seen = given.shape[1], 0 if cache is None else cache.get_seq_length()
            if kwargs.get("is_first_iteration"):
                check_mask("document_starts", starts, (given.shape[0], seen + new), given)
            more = max(0, seen + new - starts.shape[1])
            inputs["document_starts"] = F.pad(starts, (0, more))[:, seen : seen + new]
        return inputs


def from_gpt(model: GPT | NanoGPT) -> Any:
    """Convert a model for Hugging Face's classes; the modules and parameters are shared.

    Returns a DDLForCausalLM for a GPT, a DDLNanoGPTForCausalLM for a NanoGPT.
    """
    kind = DDLNanoGPTForCausalLM if isinstance(model, NanoGPT) else DDLForCausalLM
    return kind(kind.config_class.from_gpt(model.config), model).train(model.training)


def to_gpt(model: OurModel) -> Any:
    """Convert back to a GPT or NanoGPT, the inverse of `from_gpt`."""
    with torch.device("meta"):
        gpt = model.made_of(model.config.gpt)
    for name, module in model.base_model.named_children():
        gpt.get_submodule(model.inside).add_module(name, module)
    if isinstance(gpt, NanoGPT):
        gpt.lm_head = model.lm_head
    return gpt.train(model.training)
