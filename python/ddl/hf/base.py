"""Bases of our models for transformers: a decoder, and a tied head over it."""

from __future__ import annotations

import inspect
import re
from functools import cache
from pathlib import Path
from typing import Any, ClassVar, NoReturn

import torch
from torch import Tensor, nn
from transformers import GenerationMixin, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.utils.generic import can_return_tuple

from ddl.hf import remote
from ddl.models.gpt import EMBEDDING_STD
from ddl.models.sublayers import Rotary
from ddl.models.tokens import check_vocabulary
from ddl.nn.adapters import check_shared

from .attention import SUBLAYERS, ByRegistry
from .cache import CACHE, CACHE_NAMES, DDLCache, refuse_continuous_batching
from .packing import LENGTHS, for_loss, unscored


class OurBase(PreTrainedModel):
    """Modules of one of `ddl.models` with transformers' interface.

    made_of: the class in ddl.models, which is made from `config.gpt`. inside: the name of the
    module in it that has the decoder's modules; empty if it has them itself.
    """

    made_of: ClassVar[type[nn.Module]]
    inside: ClassVar[str] = ""
    supports_gradient_checkpointing = True
    _input_embed_layer = "wte"
    _supports_sdpa = True
    _supports_flash_attn = True
    _supports_flex_attn = True

    @torch.no_grad()
    def initialize_weights(self) -> None:
        """Draw the parameters that the checkpoint lacks, and fill rotary tables."""
        for module in self.modules():
            if isinstance(module, Rotary):
                module.reset_parameters()
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

    @classmethod
    def register_for_auto_class(cls, auto_class: Any = "AutoModel") -> None:
        """Do nothing: checkpoints refer to the installed module instead of containing a copy."""

    def save_pretrained(self, save_directory: Any, *args: Any, **kwargs: Any) -> None:
        """Save as the base class does, and the modelling file if the config's auto_map names it."""
        super().save_pretrained(save_directory, *args, **kwargs)
        if getattr(self.config, "auto_map", None) == remote.auto_map(self.config):
            remote.write(Path(save_directory))


class OurDecoder(OurBase):
    """The modules of one of `ddl.models` but its head, under the same names."""

    def __init__(self, config: Any, model: nn.Module | None = None) -> None:
        """Build a new model, or share the modules of `model`, parameters included."""
        super().__init__(config)
        gpt: Any = self.made_of(config.gpt) if model is None else model
        self._gpt_config = gpt.config
        for name, module in gpt.get_submodule(self.inside).named_children():
            self.add_module(name, module)
        for module in self.modules():
            module.__class__ = SUBLAYERS.get(type(module), type(module))
        self._attention = [module for module in self.modules() if isinstance(module, ByRegistry)]
        self._attend()
        half = model is None and self.dtype in (torch.bfloat16, torch.float16)
        for name, parameter in self.named_parameters():
            kept = self._keep_in_fp32_modules_strict or ()
            if half and any(re.search(pattern, name) for pattern in kept):
                parameter.data = parameter.data.float()
            # `made_of` has drawn it, in the order of its own draws.
            parameter._is_hf_initialized = not parameter.is_meta  # type: ignore[attr-defined]
        self.post_init()

    def _attend(self) -> None:
        """Let attention use the function that the config names.

        Models with a config each may share modules, as `from_gpt` makes them, so every pass calls
        this.
        """
        for module in self._attention:
            if module.config is not self.config:
                module.config = self.config


class OurModel(OurBase, GenerationMixin):
    """A decoder and a `lm_head` that is tied to its embedding."""

    decoder_class: ClassVar[type[OurDecoder]]
    lm_head: Any
    _is_stateful = True  # makes transformers refuse assisted decoding, which has to crop a cache

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Let the Trainer shift the labels of this class.

        With `label_smoothing_factor` it computes the loss itself, and shifts labels only for names
        in this table, to which AutoModelForCausalLM.register adds none. FSDP2 makes a subclass of
        another name.
        """
        super().__init_subclass__(**kwargs)
        MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[cls.__name__] = cls.__name__

    def __init__(self, config: Any, model: nn.Module | None = None) -> None:
        """Build a new model, or share the modules of `model`, parameters included."""
        super().__init__(config)
        self.loss_type = "ForCausalLM"  # transformers takes it from the class's name
        self.add_module(self.base_model_prefix, self.decoder_class(config, model))
        with torch.device("meta"):
            self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
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

        A nanoGPT takes neither documents nor a cache, and returns no hidden states.

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
        of_loss = for_loss(kwargs)
        out = self.base_model(
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
        check_shared(self.get_input_embeddings(), self.lm_head)
        single = isinstance(logits_to_keep, int)
        kept = slice(-logits_to_keep, None) if single else logits_to_keep
        logits = self.lm_head(out.last_hidden_state[:, kept])
        loss = None
        if labels is not None:
            labels = unscored(labels, out.get("document_starts"), of_loss)
            loss = self.loss_function(logits, labels, vocab_size=self.config.vocab_size, **of_loss)
        more: dict[str, Any] = {CACHE: out.get(CACHE), "hidden_states": out.get("hidden_states")}
        return CausalLMOutputWithPast(loss=loss, logits=logits, **more)

    def init_continuous_batching(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Raise ValueError, from `generate_batch`."""
        refuse_continuous_batching("this model does not take them")

    def _prepare_position_ids_for_generation(self, *args: Any, **kwargs: Any) -> None:
        """Make none: the model knows positions from mask and cache."""

    def _inputs_of_a_step(self, input_ids: Tensor, **kwargs: Any) -> dict[str, Any]:
        """Return the model's own of the arguments that `generate` hands on, such as a tokenizer.

        Names that a caller has misspelt never come here: `generate` refuses them.
        """
        base: Any = super()  # its annotations require a LongTensor
        inputs = base.prepare_inputs_for_generation(input_ids, **kwargs)
        kind: Any = type(self)
        known = _arguments_of(kind)
        return {name: value for name, value in inputs.items() if name in known}


@cache
def _arguments_of(kind: Any) -> set[str]:
    return {*inspect.signature(kind.forward).parameters, *LENGTHS, *CACHE_NAMES}


def check_given(
    config: Any, input_ids: Tensor | None, inputs_embeds: Tensor | None, *, longest: int | None
) -> Tensor:
    """Return the tokens or embeddings that are given; raise ValueError unless one of them fits.

    longest: the most tokens; None for any number.
    """
    given = input_ids if inputs_embeds is None else inputs_embeds
    if given is None or (input_ids is not None and inputs_embeds is not None):
        got = "neither" if given is None else "both"
        raise ValueError(f"`input_ids` or `inputs_embeds` must be given, got {got}")
    name, axes = ("input_ids", "") if inputs_embeds is None else ("inputs_embeds", ", hidden_size")
    some = given.ndim == (3 if axes else 2) and given.shape[1] > 0
    if not some or (longest is not None and given.shape[1] > longest):
        most = "tokens" if longest is None else f"1 to max_position_embeddings = {longest}"
        expected = f"shape (batch, {most}{axes})"
        raise ValueError(f"`{name}` must have {expected}, got {tuple(given.shape)}")
    if input_ids is not None:
        check_vocabulary("input_ids", input_ids, config.vocab_size)
    return given


def check_no_attentions(config: Any, output_attentions: bool | None) -> None:
    """Raise ValueError if attention weights are wanted."""
    if output_attentions or config.output_attentions:
        raise ValueError(
            "`output_attentions` must be false, got True: attention weights are not returned"
        )
