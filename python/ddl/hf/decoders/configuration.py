"""DDLDecoderConfig: the config.json of a converted decoder."""

from __future__ import annotations

from typing import Any, ClassVar

import transformers
from transformers import AutoConfig, PreTrainedConfig

from ddl.nanogpt import named_as_today
from ddl.paths import DECODER_MODEL_TYPE

from .structure import Structure

ARCHITECTURE = "DDLDecoderForCausalLM"


class DDLDecoderConfig(PreTrainedConfig):
    """The configuration of a converted decoder, as it is saved.

    base: of the model as transformers has it; its fields can be read and set here, too. base_type:
    its `model_type`, which is not inside, because transformers would take `base` for a whole
    configuration. made_from: the name of its class in transformers. structure: where its layers and
    norms are. stream: the options of the conversion. A converted model in memory has the
    configuration of its base.
    """

    model_type = DECODER_MODEL_TYPE
    # trl reads it of every model whose class is not in transformers.
    auto_map: ClassVar[dict[str, str]] = {}

    def __init__(
        self,
        base: dict[str, Any] | None = None,
        base_type: str | None = None,
        made_from: str | None = None,
        structure: dict[str, Any] | None = None,
        stream: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        kwargs.pop("num_hidden_layers", None)
        super().__init__(**kwargs)
        self.base_type, self.made_from = base_type, made_from
        self.structure, self.stream = structure or {}, named_as_today(stream or {})
        self.base = dict(base or {})  # last: from now on its fields are set with ours

    def __getattr__(self, name: str) -> Any:
        base = self.__dict__.get("base", {})
        if name in base:
            return base[name]
        raise AttributeError(f"{type(self).__name__} has no field {name!r}")

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if name in self.__dict__.get("base", {}):
            self.base[name] = value

    @classmethod
    def of(cls, model: Any) -> DDLDecoderConfig:
        """That of a converted model."""
        base = model.config.to_dict()
        return cls(
            {name: value for name, value in base.items() if name != "model_type"},
            base["model_type"],
            type(model).made_of[1].__name__,
            model.structure._asdict(),
            {name: model.options[name] for name in sorted(model.options)},
            dtype=model.config.dtype,
            distributed_config=getattr(model.config, "distributed_config", None),  # not stored
        )

    @property
    def of_base(self) -> PreTrainedConfig:
        """The configuration of the model as transformers has it."""
        made: PreTrainedConfig = AutoConfig.for_model(str(self.base_type), **self.base)
        if self.dtype is not None:
            made.dtype = self.dtype
        attention = getattr(self, "_attn_implementation_internal", None)
        if attention is not None:
            made._attn_implementation = attention
        return made

    @property
    def kind(self) -> Any:
        """The class in transformers of the model before it was converted."""
        return getattr(transformers, str(self.made_from))

    @property
    def parts(self) -> Structure:
        """`structure` as a Structure."""
        return Structure(**{**self.structure, "norms": tuple(self.structure["norms"])})

    def to_dict(self) -> dict[str, Any]:
        """As JSON. With its number of layers no other class makes a model from its defaults."""
        named = {"architectures": [ARCHITECTURE], "num_hidden_layers": "those in `base`"}
        return {**super().to_dict(), **named}
