"""nanoGPT's model, additive or converted, with Hugging Face's interface."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import GenerationConfig
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutput, CausalLMOutput
from transformers.utils.generic import can_return_tuple

from ddl.models import NanoGPT
from ddl.models.nanogpt import MLP, CausalSelfAttention, hidden_states
from ddl.nanogpt import logits_of_state

from .attention import HFCausalSelfAttention, attend_by
from .base import OurDecoder, OurModel, check_given, check_labels, check_unset
from .configuration import DDLNanoGPTConfig
from .packing import check_known, for_loss

__all__ = ["DDLNanoGPTForCausalLM", "DDLNanoGPTModel", "from_nanogpt", "to_nanogpt"]


class HFMLP(GradientCheckpointingLayer, MLP):
    """The MLP with activation checkpointing: the backward can recompute activations."""


SUBLAYERS = {CausalSelfAttention: HFCausalSelfAttention, MLP: HFMLP}


class NanoGPTDecoder(OurDecoder):
    """Base of DDLNanoGPTModel and DDLNanoGPTForCausalLM."""

    config_class = DDLNanoGPTConfig
    made_of = NanoGPT
    inside = "transformer"
    config: DDLNanoGPTConfig
    base_model_prefix = "transformer"
    supports_gradient_checkpointing = True
    _keep_in_fp32_modules_strict = [r"\.res_(attn|mlp)\.(gate|value)\."]  # noqa: RUF012
    _no_split_modules = ["DDLNanoGPTModel"]  # noqa: RUF012


class DDLNanoGPTModel(NanoGPTDecoder):
    """Embeddings, blocks and last norm of a nanoGPT, which has them under the same names."""

    def __init__(self, config: DDLNanoGPTConfig, transformer: nn.ModuleDict | None = None) -> None:
        """Build a new model, or share the modules of a nanoGPT's `transformer`."""
        super().__init__(config)
        modules: Any = NanoGPT(config.gpt).transformer if transformer is None else transformer
        for name, module in modules.items():
            self.add_module(name, module)
        for module in self.modules():
            module.__class__ = SUBLAYERS.get(type(module), type(module))
        self._attend()
        self._initialized(fresh=transformer is None)
        self.post_init()

    def _attend(self) -> None:
        blocks: Any = self.h
        attend_by(self.config, (block.attn for block in blocks))

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        **kwargs: Any,
    ) -> BaseModelOutput:
        """The head's input of each token; the arguments are those of `DDLNanoGPTForCausalLM`."""
        given = check_given(self.config, input_ids, inputs_embeds, longest=self.config.block_size)
        check_unset(output_attentions or self.config.output_attentions)
        if output_hidden_states or kwargs.get("past_key_values") is not None:
            name = "output_hidden_states" if output_hidden_states else "past_key_values"
            raise ValueError(f"`{name}` must be left out for a nanoGPT, got one")
        check_known(kwargs, packed=False)
        self._attend()
        x = self.get_input_embeddings()(given) if inputs_embeds is None else inputs_embeds
        padding = _padding_on_the_left(attention_mask, x)
        h = hidden_states(self, _rolled(x, padding))
        return BaseModelOutput(_rolled(h, None if padding is None else -padding))


class DDLNanoGPTForCausalLM(OurModel, NanoGPTDecoder):
    """A nanoGPT, as `ddl import` writes it: `transformer` and a tied `lm_head`.

    The modules are those of `ddl.models.NanoGPT` under the same names.

    dtype: in bfloat16 and float16, the rewrite's gates and values keep float32 parameters.
    Generation has no cache: every new token costs a whole sequence, of the last block_size tokens.
    Padding is on the left or on the right. `device_map` keeps the whole model on one device.
    """

    _tied_weights_keys = {"lm_head.weight": "transformer.wte.weight"}  # noqa: RUF012
    _is_stateful = True  # makes transformers refuse assisted decoding, which needs a cache

    def __init__(self, config: DDLNanoGPTConfig, model: NanoGPT | None = None) -> None:
        """Build a new model, or share the modules of `model`, parameters included."""
        super().__init__(config)
        self.loss_type = "ForCausalLM"
        fresh = model is None
        model = NanoGPT(config.gpt) if model is None else model
        self.transformer = DDLNanoGPTModel(config, model.transformer)
        self.lm_head = model.lm_head
        self._initialized(fresh)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        **kwargs: Any,
    ) -> CausalLMOutput:
        """Logits of the next token, and the loss if `labels` are given.

        Args:
            input_ids: (B, T) int64 tokens, T ≤ block_size.
            attention_mask: (B, T), 0 for padding, which is all on the left or all on the right.
            inputs_embeds: (B, T, d), instead of `input_ids`.
            labels: (B, T) int64, usually `input_ids`. They are shifted here; −100 is ignored.
            use_cache: has no effect: there is no cache.
            output_attentions, output_hidden_states: must not be set.
            logits_to_keep: return logits of only this many tokens at the end, 0 for all; or of the
                tokens at these positions (n,). Only without `labels`.
            kwargs: for the loss: `num_items_in_batch`, `shift_labels`, `ignore_index`.

        Returns logits (B, T, vocab_size) and, with `labels`, the scalar loss in nats.
        Raises ValueError if an argument does not fit, TypeError for an unknown one.
        """
        check_labels(labels, input_ids, inputs_embeds, logits_to_keep)
        of_loss = for_loss(kwargs)
        out = self.transformer(
            input_ids,
            attention_mask=attention_mask,
            inputs_embeds=inputs_embeds,
            output_attentions=output_attentions,
            output_hidden_states=output_hidden_states,
            return_dict=True,
            **kwargs,
        )
        logits = self._logits(out.last_hidden_state, logits_to_keep)
        loss = None
        if labels is not None:
            loss = self.loss_function(logits, labels, vocab_size=self.config.vocab_size, **of_loss)
        return CausalLMOutput(loss=loss, logits=logits)

    def logits_of_state(self, state: Tensor) -> Tensor:
        """Map a state X (B, T, d, m) of a converted model's stream to logits (B, T, V)."""
        return logits_of_state(self, state)

    # --- generation -------------------------------------------------------------------------------

    def _prepare_cache_for_generation(
        self, generation_config: GenerationConfig, *args: Any, **kwargs: Any
    ) -> bool:
        """Let `generate` compute whole sequences."""
        generation_config.use_cache = False
        return False

    def prepare_inputs_for_generation(  # type: ignore[override]
        self, input_ids: Tensor, attention_mask: Tensor | None = None, **kwargs: Any
    ) -> dict[str, Any]:
        """Keep the last block_size tokens, as nanoGPT's own `generate` does."""
        last = -self.config.block_size
        mask = None if attention_mask is None else attention_mask[:, last:]
        return self._inputs_of_a_step(input_ids[:, last:], attention_mask=mask, **kwargs)


def from_nanogpt(model: NanoGPT) -> DDLNanoGPTForCausalLM:
    """Convert a NanoGPT for Hugging Face's classes; the modules and parameters are shared."""
    config = DDLNanoGPTConfig.from_gpt(model.config)
    return DDLNanoGPTForCausalLM(config, model).train(model.training)


def to_nanogpt(model: DDLNanoGPTForCausalLM) -> NanoGPT:
    """Convert back to a NanoGPT, the inverse of `from_nanogpt`."""
    with torch.device("meta"):
        gpt = NanoGPT(model.config.gpt)
    gpt.transformer = nn.ModuleDict(dict(model.transformer.named_children()))
    gpt.lm_head = model.lm_head
    return gpt.train(model.training)


def _padding_on_the_left(attention_mask: Tensor | None, x: Tensor) -> Tensor | None:
    """The tokens of padding (B,) before each sequence; None if there is none.

    Raises ValueError if the mask is of another shape, has zeros between ones, or only zeros.
    """
    if attention_mask is None:
        return None
    if attention_mask.shape != x.shape[:2]:
        expected, got = tuple(x.shape[:2]), tuple(attention_mask.shape)
        raise ValueError(f"`attention_mask` must have shape {expected}, got {got}")
    mask = attention_mask.bool()
    runs = mask[:, :1].long().sum(1) + (mask[:, 1:] & ~mask[:, :-1]).sum(1)
    if (runs != 1).any():
        must = "`attention_mask` must have ones side by side in every row"
        raise ValueError(f"{must}, got a row with none or with gaps")
    padding = mask.long().argmax(1)
    return padding if padding.any() else None


def _rolled(x: Tensor, by: Tensor | None) -> Tensor:
    """Move each sequence of x (B, T, d) to the left by so many tokens (B,), around the end.

    With the padding at the end, positions start at 0 and no causal part of the model sees it:
    neither attention nor a convolution over time.
    """
    if by is None:
        return x
    T = x.shape[1]
    index = (torch.arange(T, device=x.device) + by[:, None].to(x.device)) % T
    return x.gather(1, index[..., None].expand_as(x))
