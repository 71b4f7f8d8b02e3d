"""DDLForCausalLM: the models of `ddl.models` with Hugging Face's interface."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import GenerationConfig

from ddl.models import GPT, NanoGPT
from ddl.models.scaling import learning_rate_scales
from ddl.models.trunk import read_out
from ddl.ops.checks import check_mask

from .base import OurModel
from .cache import CACHE, DDLCache, cache_in
from .model import DDLBase, DDLModel
from .nanogpt import DDLNanoGPTForCausalLM

__all__ = ["DDLForCausalLM", "from_gpt", "to_gpt"]


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
