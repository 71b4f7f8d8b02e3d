"""DDLForCausalLM: the models of `ddl.models` with Hugging Face's interface."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import GenerationConfig
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.utils.generic import can_return_tuple

from ddl.models import GPT
from ddl.models.scaling import learning_rate_scales
from ddl.models.trunk import read_out
from ddl.ops.checks import check_mask

from .base import OurModel, check_labels
from .cache import CACHE, DDLCache, cache_in
from .configuration import DDLConfig
from .model import DDLDecoder, DDLModel, DDLModelOutput
from .packing import for_loss, unscored

__all__ = ["DDLForCausalLM", "from_gpt", "to_gpt"]


class DDLForCausalLM(OurModel, DDLDecoder):
    """A language model with any residual of ddl-rs: `model`, a DDLModel, and the tied `lm_head`.

    Logits are those of `ddl.models.GPT`, bit for bit; its parameters' names follow `model.` here.
    `ddl.hf.from_gpt` converts a GPT.

    Generation: greedy, sampling and beam search, with `DDLCache` as the only cache.
    Gradient checkpointing: the backward recomputes the sublayers' activations.
    Parallelism: `device_map` keeps the whole trunk on one device.
    """

    _tied_weights_keys = {"lm_head.weight": "model.wte.weight"}  # noqa: RUF012
    _is_stateful = True  # makes transformers refuse assisted decoding, which has to crop the cache

    def __init__(self, config: DDLConfig, model: GPT | None = None) -> None:
        """Build a new model, or share the modules of `model`, parameters included."""
        super().__init__(config)
        self.loss_type = "ForCausalLM"  # transformers takes it from the class's name
        self.model = DDLModel(config, model)
        with torch.device("meta"):
            self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self._initialized(fresh=False)
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
            input_ids: (B, T) int64 tokens, T ≤ block_size; or any number of tokens in documents of
                at most block_size each.
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
        check_labels(labels, input_ids, inputs_embeds, logits_to_keep)
        of_loss = for_loss(kwargs)
        out: DDLModelOutput = self.model(
            input_ids,
            attention_mask=attention_mask,
            past_key_values=past_key_values,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            output_hidden_states=output_hidden_states,
            output_attentions=output_attentions,
            document_starts=document_starts,
            position_ids=position_ids,
            seq_idx=seq_idx,
            cache=cache,
            return_dict=True,
            **kwargs,
        )
        logits = self._logits(out.last_hidden_state, logits_to_keep)
        loss = None
        if labels is not None:
            labels = unscored(labels, out.document_starts, of_loss)
            loss = self.loss_function(logits, labels, vocab_size=self.config.vocab_size, **of_loss)
        named: dict[str, Any] = {CACHE: out.get(CACHE)}
        return CausalLMOutputWithPast(
            loss=loss, logits=logits, hidden_states=out.hidden_states, **named
        )

    def learning_rate_scales(self) -> Iterator[tuple[nn.Parameter, float, float]]:
        """Factors of learning rates, as `GPT.learning_rate_scales`, for `ddl.optim`."""
        return learning_rate_scales(self.model._gpt_config, self.model, GPT)

    def logits_of_state(self, state: Tensor) -> Tensor:
        """Map a state X (B, T, d, m) of the stream to logits (B, T, V), as after the last sublayer.

        For one value channel, and for the additive residual, the state is (B, T, d, 1).
        """
        model = self.model
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


def from_gpt(model: GPT) -> DDLForCausalLM:
    """Convert a GPT for Hugging Face's classes; the modules and parameters are shared."""
    return DDLForCausalLM(DDLConfig.from_gpt(model.config), model).train(model.training)


def to_gpt(model: DDLForCausalLM) -> GPT:
    """Convert back to a GPT, the inverse of `from_gpt`; modules and parameters are shared."""
    with torch.device("meta"):
        gpt = GPT(model.config.gpt)
    gpt.wte, gpt.trunk = model.model.wte, model.model.trunk
    return gpt.train(model.training)
