"""Bases of our models for transformers: a decoder, and a tied head over it."""

from __future__ import annotations

import inspect
import re
from functools import cache
from pathlib import Path
from typing import Any, ClassVar, NoReturn, cast

import torch
from torch import Tensor, nn
from transformers import GenerationMixin, PreTrainedModel

from ddl.hf import remote
from ddl.models.gpt import EMBEDDING_STD
from ddl.models.tokens import check_vocabulary
from ddl.nn.adapters import check_shared

from .cache import CACHE_NAMES, refuse_continuous_batching
from .causal import CausalName
from .packing import LENGTHS

__all__ = ["OurDecoder", "OurModel", "check_given", "check_labels", "check_unset"]


class OurDecoder(PreTrainedModel):
    """The modules of one of `ddl.models` but its head, with transformers' interface.

    made_of: the class in ddl.models, which is made from `config.gpt`. inside: the name of the
    module in it that has the decoder's modules; empty if it has them itself.
    """

    made_of: ClassVar[type[nn.Module]]
    inside: ClassVar[str] = ""
    _supports_sdpa = True
    _supports_flash_attn = True
    _supports_flex_attn = True

    def get_input_embeddings(self) -> nn.Module:
        return cast(nn.Module, self.base_model.wte)

    def set_input_embeddings(self, value: nn.Module) -> None:
        self.base_model.wte = value

    @torch.no_grad()
    def initialize_weights(self) -> None:
        """Draw the parameters that the checkpoint lacks."""
        missing = {
            name: parameter
            for name, parameter in self.base_model.named_parameters()
            if not getattr(parameter, "_is_hf_initialized", False) and not parameter.is_meta
        }
        if missing:
            drawn = self.made_of(self.config.gpt).get_submodule(self.inside).state_dict()
            for name, parameter in missing.items():
                parameter.copy_(drawn[name])

    def _init_weights(self, module: nn.Module) -> None:
        """Initialise a module that transformers adds: resized embeddings."""
        if isinstance(module, nn.Embedding | nn.Linear):
            nn.init.normal_(module.weight, std=EMBEDDING_STD)

    def _initialized(self, fresh: bool) -> None:
        """Mark parameters that exist as initialised: they were, in the order of `made_of`'s draws.

        Those that stay float32 in half precision become so if the model was made now.
        """
        half = fresh and self.dtype in (torch.bfloat16, torch.float16)
        for name, parameter in self.named_parameters():
            kept = self._keep_in_fp32_modules_strict or ()
            if half and any(re.search(pattern, name) for pattern in kept):
                parameter.data = parameter.data.float()
            parameter._is_hf_initialized = not parameter.is_meta  # type: ignore[attr-defined]

    @classmethod
    def register_for_auto_class(cls, auto_class: Any = "AutoModel") -> None:
        """Do nothing: checkpoints refer to the installed module instead of containing a copy."""

    def save_pretrained(self, save_directory: Any, *args: Any, **kwargs: Any) -> None:
        """Save as the base class does, and the modelling file if the config's auto_map names it."""
        super().save_pretrained(save_directory, *args, **kwargs)
        if getattr(self.config, "auto_map", None) == remote.auto_map(self.config):
            remote.write(Path(save_directory))


class OurModel(CausalName, OurDecoder, GenerationMixin):
    """A decoder and a `lm_head` that is tied to its embedding."""

    lm_head: Any

    def init_continuous_batching(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Raise ValueError, from `generate_batch`."""
        refuse_continuous_batching("this model does not take them")

    def get_output_embeddings(self) -> nn.Module:
        return self.lm_head

    def set_output_embeddings(self, new_embeddings: nn.Module) -> None:
        self.lm_head = new_embeddings

    def _inputs_of_a_step(self, input_ids: Tensor, **kwargs: Any) -> dict[str, Any]:
        """Return the model's own of the arguments that `generate` hands on, such as a tokenizer.

        Names that a caller has misspelt never come here: `generate` refuses them.
        """
        base: Any = super()  # its annotations require a LongTensor
        inputs = base.prepare_inputs_for_generation(input_ids, **kwargs)
        kind: Any = type(self)
        known = _arguments_of(kind)
        return {name: value for name, value in inputs.items() if name in known}

    def _logits(self, h: Any, logits_to_keep: int | Tensor) -> Tensor:
        """Map h (B, T, d) to the logits of so many last tokens, 0 for all, or of those tokens."""
        check_shared(self.get_input_embeddings(), self.lm_head)
        single = isinstance(logits_to_keep, int)
        kept = h[:, slice(-logits_to_keep, None) if single else logits_to_keep]
        return cast(Tensor, self.lm_head(kept))


@cache
def _arguments_of(kind: Any) -> set[str]:
    return {*inspect.signature(kind.forward).parameters, *LENGTHS, *CACHE_NAMES}


def check_given(
    config: Any,
    input_ids: Tensor | None,
    inputs_embeds: Tensor | None,
    *,
    longest: int | None,
) -> Tensor:
    """Return the tokens or embeddings that are given; raise ValueError unless one of them fits.

    longest: the most tokens; None for any number.
    """
    given = input_ids if inputs_embeds is None else inputs_embeds
    if given is None or (input_ids is not None and inputs_embeds is not None):
        got = "neither" if given is None else "both"
        raise ValueError(f"`input_ids` or `inputs_embeds` must be given, got {got}")
    ndim = 2 if inputs_embeds is None else 3
    some = given.ndim == ndim and given.shape[1] > 0
    if not some or (longest is not None and given.shape[1] > longest):
        name = "input_ids" if inputs_embeds is None else "inputs_embeds"
        most = "tokens" if longest is None else f"1 to max_position_embeddings = {longest}"
        axes = ", hidden_size" if ndim == 3 else ""
        expected = f"shape (batch, {most}{axes})"
        raise ValueError(f"`{name}` must have {expected}, got {tuple(given.shape)}")
    if input_ids is not None:
        check_vocabulary("input_ids", input_ids, config.vocab_size)
    return given


def check_labels(
    labels: Tensor | None,
    input_ids: Tensor | None,
    inputs_embeds: Tensor | None,
    logits_to_keep: int | Tensor,
) -> None:
    """Raise ValueError unless `labels` fit the tokens or embeddings and all logits are wanted."""
    given = input_ids if inputs_embeds is None else inputs_embeds
    if labels is None or given is None:  # `check_given` refuses that
        return
    if labels.shape != given.shape[:2]:
        raise ValueError(
            f"`labels` must have shape {tuple(given.shape[:2])}, got {tuple(labels.shape)}"
        )
    if not isinstance(logits_to_keep, int) or logits_to_keep != 0:
        raise ValueError(f"`logits_to_keep` must be 0 with `labels`, got {logits_to_keep}")


def check_unset(output_attentions: bool | None) -> None:
    """Raise ValueError if attention weights are wanted."""
    if output_attentions:
        raise ValueError(
            "`output_attentions` must be false, got True: attention weights are not returned"
        )
