"""DDLConfig: a `GPTConfig` as Hugging Face's classes want it."""

from __future__ import annotations

from dataclasses import fields
from typing import Any, ClassVar

from transformers import PreTrainedConfig

from ddl.config import GPTConfig
from ddl.errors import InputError
from ddl.files import MODEL_TYPE

__all__ = ["DDLConfig"]

FIELDS = tuple(field.name for field in fields(GPTConfig))


class DDLConfig(PreTrainedConfig):
    """The shape of a model: every field of `ddl.config.GPTConfig` under its own name.

    Transformers' names num_hidden_layers, num_attention_heads and max_position_embeddings work as
    well, for num_layers, num_heads and block_size. Everything else that a PreTrainedConfig takes
    (dtype, eos_token_id, …) is passed on.

    Raises ValueError (InputError) for values that GPTConfig refuses, in its sentences.
    """

    model_type = MODEL_TYPE
    attribute_map: ClassVar[dict[str, str]] = {
        "num_hidden_layers": "num_layers",
        "num_attention_heads": "num_heads",
        "max_position_embeddings": "block_size",
    }

    def __init__(self, **options: Any) -> None:
        own = {self.attribute_map.get(name, name): value for name, value in options.items()}
        model = GPTConfig(**{name: own.pop(name) for name in FIELDS if name in own})
        for name in FIELDS:
            setattr(self, name, getattr(model, name))
        self.tie_word_embeddings = own.pop("tie_word_embeddings", True)
        if not self.tie_word_embeddings:
            raise InputError(
                "`tie_word_embeddings` must be true, got false: the head is the embedding itself"
            )
        for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
            setattr(self, name, own.pop(name, None))
        super().__init__(**own)

    @classmethod
    def register_for_auto_class(cls, auto_class: Any = "AutoConfig") -> None:
        """Does nothing: checkpoints refer to this installed module, they do not carry a copy."""

    @classmethod
    def from_gpt(cls, config: GPTConfig) -> DDLConfig:
        """The config of the same model."""
        return cls(**{name: getattr(config, name) for name in FIELDS})

    @property
    def gpt(self) -> GPTConfig:
        """The same as a GPTConfig, checked anew: the fields here can be assigned."""
        return GPTConfig(**{name: getattr(self, name) for name in FIELDS})

    @property
    def head_dim(self) -> int:
        """Width of an attention head."""
        return self.gpt.head_dim
