"""nanoGPT's model, additive or converted, with Hugging Face's interface."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig
from transformers.modeling_outputs import BaseModelOutput
from transformers.utils.generic import can_return_tuple

from ddl.models import NanoGPT
from ddl.models.nanogpt import hidden_states
from ddl.nanogpt import logits_of_state

from .base import OurBase, OurDecoder, OurModel, check_given, check_no_attentions
from .configuration import DDLNanoGPTConfig
from .packing import check_known


class NanoGPTBase(OurBase):
    """Base of DDLNanoGPTModel and DDLNanoGPTForCausalLM."""

    config_class = DDLNanoGPTConfig
    made_of = NanoGPT
    inside = "transformer"
    config: DDLNanoGPTConfig
    base_model_prefix = "transformer"
    _keep_in_fp32_modules_strict = [r"\.res_(attn|mlp)\.(gate|value)\."]  # noqa: RUF012
    _no_split_modules = ["DDLNanoGPTModel"]  # noqa: RUF012


class DDLNanoGPTModel(OurDecoder, NanoGPTBase):
    """Embeddings, blocks and last norm of a nanoGPT, which has them under the same names."""

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
        """The head's input of each token; the arguments are those of `DDLNanoGPTForCausalLM`.

        use_cache has no effect: there is no cache.
        """
        given = check_given(self.config, input_ids, inputs_embeds, longest=self.config.block_size)
        check_no_attentions(self.config, output_attentions)
        check_known({**kwargs, "output_hidden_states": output_hidden_states or None}, packed=False)
        self._attend()
        x = self.get_input_embeddings()(given) if inputs_embeds is None else inputs_embeds
        padding = _padding_on_the_left(attention_mask, x)
        h = hidden_states(self, _rolled(x, padding))
        return BaseModelOutput(_rolled(h, None if padding is None else -padding))


class DDLNanoGPTForCausalLM(OurModel, NanoGPTBase):
    """A nanoGPT, as `ddl import` writes it: `transformer` and a tied `lm_head`.

    The modules are those of `ddl.models.NanoGPT` under the same names.

    dtype: in bfloat16 and float16, the rewrite's gates and values keep float32 parameters.
    Generation has no cache: every new token costs a whole sequence, of the last block_size tokens.
    Padding is on the left or on the right. `device_map` keeps the whole model on one device.
    """

    decoder_class = DDLNanoGPTModel
    _tied_weights_keys = {"lm_head.weight": "transformer.wte.weight"}  # noqa: RUF012

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
