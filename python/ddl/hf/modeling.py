"""DDLForCausalLM: the models of `ddl.models` with Hugging Face's interface."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import GenerationConfig
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.utils.generic import can_return_tuple

from ddl.models import GPT
from ddl.models.scaling import learning_rate_scales
from ddl.models.sublayers import Attention, Rotary, SwiGLU, TimeMixer
from ddl.models.trunk import hidden_states, read_out
from ddl.nn.adapters import check_shared
from ddl.ops.checks import check_mask

from .base import OurModel, check_given, check_labels, check_unset
from .cache import CACHE, CACHE_NAMES, DDLCache, cache_in, our_cache
from .configuration import DDLConfig
from .packing import check_known, mask_of_numbers, starts_of, unscored

__all__ = ["DDLForCausalLM", "from_gpt", "to_gpt"]

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


class RecomputedAttention(GradientCheckpointingLayer, Attention):
    """Attention with activation checkpointing: the backward can recompute activations."""


class RecomputedTimeMixer(GradientCheckpointingLayer, TimeMixer):
    """TimeMixer with activation checkpointing."""


class RecomputedSwiGLU(GradientCheckpointingLayer, SwiGLU):
    """The MLP with activation checkpointing."""


RECOMPUTED = {
    Attention: RecomputedAttention,
    TimeMixer: RecomputedTimeMixer,
    SwiGLU: RecomputedSwiGLU,
}


class DDLForCausalLM(OurModel):
    """A language model with any residual of ddl-rs: embedding, trunk, tied head.

    Embedding and trunk are those of `ddl.models.GPT` under the same names. So the state dicts
    differ only in the tied `lm_head.weight`, which is not saved, and logits are equal bit for bit.
    `ddl.hf.from_gpt` converts a GPT.

    dtype: in bfloat16 and float16, the rewrite's gates and values keep float32 parameters.
    Generation: greedy, sampling and beam search, with `DDLCache` as the only cache.
    Gradient checkpointing: the backward recomputes the sublayers' activations.
    Parallelism: `device_map` keeps the whole trunk on one device.
    """

    config_class = DDLConfig
    made_of = GPT
    config: DDLConfig
    supports_gradient_checkpointing = True
    _supports_sdpa = True
    _tied_weights_keys = {"lm_head.weight": "wte.weight"}  # noqa: RUF012
    _keep_in_fp32_modules_strict = WIDE
    # The fused operators read these modules' parameters without calling them, so accelerate's hooks
    # could not move them between devices.
    _no_split_modules = [  # noqa: RUF012
        "AdditiveStream",
        "ConvolvedStream",
        "ConnectedStream",
        "AttentionResidualStream",
        "DeltaStream",
    ]
    _skip_keys_device_placement = list(CACHE_NAMES)  # noqa: RUF012
    _is_stateful = True  # makes transformers refuse assisted decoding, which has to crop the cache

    def __init__(self, config: DDLConfig, model: GPT | None = None) -> None:
        """Build a new model, or share the modules of `model`, parameters included."""
        super().__init__(config)
        self.loss_type = "ForCausalLM"  # transformers takes it from the class's name
        fresh = model is None
        model = GPT(config.gpt) if model is None else model
        self._gpt_config = model.config
        self.wte, self.trunk = model.wte, model.trunk
        for sublayer in self.trunk.sublayers:
            sublayer.__class__ = RECOMPUTED.get(type(sublayer), type(sublayer))
        with torch.device("meta"):
            self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self._initialized(fresh)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        past_key_values: DDLCache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        output_hidden_states: bool | None = None,
        output_attentions: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        document_starts: Tensor | None = None,
        position_ids: Tensor | None = None,
        seq_idx: Tensor | None = None,
        cache: DDLCache | None = None,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast:
        """Logits of the next token, and the loss if `labels` are given.

        Args:
            input_ids: (B, T) int64 tokens, T ≤ block_size.
            attention_mask: (B, T), 0 for padding, on the left or on the right; with a cache
                (B, cached tokens + T). Positions follow from it.
            past_key_values: a `DDLCache` of the tokens before these, which are appended to it.
            inputs_embeds: (B, T, d), instead of `input_ids`.
            labels: (B, T) int64, usually `input_ids`. They are shifted here; −100 is ignored.
            use_cache: make a cache if none is given. By default only `generate` does.
            output_hidden_states: also return num_layers + 1 tensors (B, T, d): tensor i is the
                input of block i, the compressed and normalised stream after i blocks; the last one
                is the final read, the head's input. (The stream itself has value channels.)
            output_attentions: must not be set: attention weights are never computed.
            logits_to_keep: return logits of only this many tokens at the end, 0 for all; or of the
                tokens at these positions (n,). Only without `labels`.
            document_starts: (B, T) bool, True for the first token of each document in sequences
                that hold several; as in `ddl.models.GPT`. For `generate`, of all tokens in the
                prompt, those in a cache included.
            position_ids: (B, T) or (1, T) integers, which start at 0 in every document.
            seq_idx: (B, T) or (1, T) integers, the number of each token's document. This and
                `position_ids` are other ways to give `document_starts`, without a cache.
            cache: the name of `past_key_values` from transformers 5.24 on.
            kwargs: for the loss: `num_items_in_batch`, `shift_labels`, `ignore_index`; for one
                sequence of documents: `cu_seq_lens_q` and `cu_seq_lens_k`, their cumulated lengths
                from 0 to T, and `max_length_q` and `max_length_k`, which are not needed.

        Returns logits (B, T, vocab_size) and, with `labels`, the scalar loss in nats.
        Raises ValueError if an argument does not fit, TypeError for an unknown one.
        """
        given = check_given(self.config, input_ids, inputs_embeds)
        check_labels(labels, given, logits_to_keep)
        check_unset(output_attentions or self.config.output_attentions)
        check_known(kwargs)
        if output_hidden_states is None:
            output_hidden_states = self.config.output_hidden_states
        cache = our_cache(past_key_values=past_key_values, cache=cache)
        if use_cache and cache is None:
            cache = DDLCache(self._gpt_config)
        check_shared(self.wte, self.lm_head)
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
        x = self.wte(input_ids) if inputs_embeds is None else inputs_embeds
        with self._recorded(output_hidden_states) as seen:
            h = hidden_states(
                self.trunk,
                self._gpt_config,
                x,
                attention_mask=attention_mask,
                cache=None if cache is None else cache.cache,
                document_starts=document_starts,
            )
        single = isinstance(logits_to_keep, int)
        logits = self.lm_head(h[:, slice(-logits_to_keep, None) if single else logits_to_keep])
        loss = None
        if labels is not None:
            if document_starts is not None:
                labels = unscored(labels, document_starts, kwargs)
            loss = self.loss_function(logits, labels, vocab_size=self.config.vocab_size, **kwargs)
        named: dict[str, Any] = {CACHE: cache}
        return CausalLMOutputWithPast(
            loss=loss,
            logits=logits,
            hidden_states=(*seen, h) if output_hidden_states else None,
            **named,
        )

    def learning_rate_scales(self) -> Iterator[tuple[nn.Parameter, float, float]]:
        """Factors of learning rates, as `GPT.learning_rate_scales`, for `ddl.optim`."""
        return learning_rate_scales(self._gpt_config, self, GPT)

    def logits_of_state(self, state: Tensor) -> Tensor:
        """Map a state X (B, T, d, m) of the stream to logits (B, T, V), as after the last sublayer.

        For one value channel, and for the additive residual, the state is (B, T, d, 1).
        """
        logits: Tensor = self.lm_head(read_out(self.trunk, self._gpt_config, state))
        return logits

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

    # --- embeddings -------------------------------------------------------------------------------

    def get_input_embeddings(self) -> nn.Module:
        return self.wte

    def set_input_embeddings(self, value: nn.Module) -> None:
        self.wte = cast(nn.Embedding, value)

    # --- initialisation ---------------------------------------------------------------------------

    @torch.no_grad()
    def initialize_weights(self) -> None:
        """Draw the parameters that the checkpoint lacks, and fill the rotary tables."""
        for module in self.modules():
            if isinstance(module, Rotary):
                module.reset_parameters()
        super().initialize_weights()

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
        most, asked = self.config.block_size + 1, generation_config.max_length
        limited = self._gpt_config.attends or not generation_config.use_cache
        if asked is not None and asked > most and limited:
            expected = f"prompt and new tokens within {most}, the context and one more"
            raise ValueError(f"`max_new_tokens` must keep {expected}, got {asked} in all")
        if generation_config.use_cache and cache_in(model_kwargs) is None:
            model_kwargs[CACHE] = DDLCache(self._gpt_config)
        return True

    def _prepare_position_ids_for_generation(self, *args: Any, **kwargs: Any) -> None:
        """Make none: the model knows positions from mask and cache."""

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
        base: Any = super()  # its annotations require a LongTensor and its own output class
        inputs: dict[str, Any] = base.prepare_inputs_for_generation(input_ids, **kwargs)
        cache = cache_in(inputs)
        goes_on = not kwargs.get("is_first_iteration") and cache is not None
        if kwargs.get("position_ids") is None or goes_on:
            inputs.pop("position_ids", None)
        inputs.pop("cache_position", None)  # made by releases of transformers before 5.23
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


def from_gpt(model: GPT) -> DDLForCausalLM:
    """Convert a GPT for Hugging Face's classes; the modules and parameters are shared."""
    return DDLForCausalLM(DDLConfig.from_gpt(model.config), model).train(model.training)


def to_gpt(model: DDLForCausalLM) -> GPT:
    """Convert back to a GPT, the inverse of `from_gpt`; modules and parameters are shared."""
    with torch.device("meta"):
        gpt = GPT(model.config.gpt)
    gpt.wte, gpt.trunk = model.wte, model.trunk
    return gpt.train(model.training)
