"""Configurations of our models, `GPTConfig` and `NanoGPTConfig`, for transformers."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import fields
from typing import Any, ClassVar

from transformers import GenerationConfig, PreTrainedConfig

from ddl.errors import NEWER, InputError
from ddl.models import NanoGPTConfig
from ddl.models.config import GPTConfig
from ddl.nanogpt import named_as_today
from ddl.options import near, without_removed
from ddl.paths import MODEL_TYPE, NANOGPT_MODEL_TYPE

# Fields that some version of transformers or its quantizers accepts or stores, although
# PreTrainedConfig has no attribute for them.
FOREIGN = frozenset(vars(GenerationConfig())) | {
    "attn_implementation", "auto_map", "bos_token_id", "compression_config", "custom_pipelines",
    "eos_token_id", "experts_implementation", "pad_token_id", "quantization_config",
    "tie_last_hidden_states", "tie_word_embeddings", "tokenizer_class", "torch_dtype",
}  # fmt: skip


class DDLConfig(PreTrainedConfig):
    """Configuration of a model: every field of `ddl.lab.config.GPTConfig` under its own name.

    transformers' names num_hidden_layers, num_attention_heads and max_position_embeddings work,
    too, for num_layers, num_heads and block_size. All other arguments of a PreTrainedConfig (dtype,
    eos_token_id, …) are passed on, as are names that begin with an underscore.

    Raises InputError, a ValueError, for values that GPTConfig refuses and for unknown names, which
    are probably misspelt: silently, the default would be used.
    """

    model_type = MODEL_TYPE
    # trl reads it of every model whose class is not in transformers.
    auto_map: ClassVar[dict[str, str]] = {}
    attribute_map: ClassVar[dict[str, str]] = {
        "num_hidden_layers": "num_layers",
        "num_attention_heads": "num_heads",
        "max_position_embeddings": "block_size",
    }
    # Embedding, mixers and the stream are in no row: every process has and computes all of them.
    base_model_tp_plan: ClassVar[dict[str, str] | None] = {
        f"trunk.sublayers.*.{name}": style
        for style, names in {
            "colwise": ("c_q", "c_k", "c_v", "c_fc1", "c_fc2"),
            "rowwise": ("c_proj",),
        }.items()
        for name in names
    }

    made_of: ClassVar[type] = GPTConfig  # whose fields it has

    def __init__(self, **options: Any) -> None:
        self._check_known(options)
        own = {self.attribute_map.get(name, name): value for name, value in options.items()}
        names = self._names()
        model = self.made_of(**{name: own.pop(name) for name in names if name in own})
        for name in names:
            setattr(self, name, getattr(model, name))
        self.tie_word_embeddings = own.pop("tie_word_embeddings", True)
        if not self.tie_word_embeddings:
            raise InputError(
                "tie_word_embeddings", "be true", "false: the head is the embedding itself"
            )
        for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
            setattr(self, name, own.pop(name, None))
        super().__init__(**own)

    @classmethod
    def _names(cls) -> tuple[str, ...]:
        return tuple(field.name for field in fields(cls.made_of))

    @classmethod
    def _check_known(cls, names: Iterable[str]) -> None:
        """Raise InputError for a name that is a field neither here nor in transformers."""
        ours = (*cls._names(), *cls.attribute_map)
        for name in names:
            if name in ours or name in FOREIGN or name.startswith("_") or _is_field(cls, name):
                continue
            got = f"an unknown one{near(name, ours) or f'; {NEWER}'}"
            raise InputError(name, f"be a field of {cls.__name__}", got)

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        """Do as the base class, which calls this to read a config.json."""
        return super().from_dict(without_removed(config_dict), **kwargs)

    @classmethod
    def register_for_auto_class(cls, auto_class: Any = "AutoConfig") -> None:
        """Do nothing: checkpoints refer to the installed module instead of containing a copy."""

    @classmethod
    def from_gpt(cls, config: Any) -> Any:
        """Make this configuration from a model's, a GPTConfig."""
        return cls(**{name: getattr(config, name) for name in cls._names()})

    @property
    def gpt(self) -> Any:
        """The same options as a GPTConfig, checked again because fields here can be assigned."""
        return self.made_of(**{name: getattr(self, name) for name in self._names()})

    @property
    def head_dim(self) -> int:
        """Width of an attention head."""
        return int(self.gpt.head_dim)


class DDLNanoGPTConfig(DDLConfig):
    """Configuration of a nanoGPT: every field of `ddl.models.NanoGPTConfig` under its own name.

    Otherwise as DDLConfig, transformers' names included.
    """

    model_type = NANOGPT_MODEL_TYPE
    attribute_map: ClassVar[dict[str, str]] = {
        "hidden_size": "n_embd",
        "num_hidden_layers": "n_layer",
        "num_attention_heads": "n_head",
        "max_position_embeddings": "block_size",
    }
    base_model_tp_plan = None  # q, k and v are one projection
    made_of = NanoGPTConfig

    def __init__(self, **options: Any) -> None:
        if isinstance(options.get("delta"), dict):
            options["delta"] = named_as_today(options["delta"])
        super().__init__(**options)

    @property
    def residual(self) -> str:
        """The papers' name of the stream."""
        return str(self.gpt.residual)

    @property
    def head_dim(self) -> int:
        return int(self.n_embd // self.n_head)


def _is_field(cls: type, name: str) -> bool:
    """Return whether the class has an assignable attribute of this name that is no method."""
    attribute = getattr(cls, name, _is_field)
    if isinstance(attribute, property):
        return attribute.fset is not None
    return not callable(attribute)
