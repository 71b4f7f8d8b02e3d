"""DDLDecoderConfig: the config.json of a converted decoder."""

from __future__ import annotations

from typing import Any

from transformers import AutoConfig, PreTrainedConfig

from ddl.errors import InputError
from ddl.paths import DECODER_MODEL_TYPE

from .structure import Structure

__all__ = ["ARCHITECTURE", "DDLDecoderConfig"]

ARCHITECTURE = "DDLDecoderForCausalLM"


class DDLDecoderConfig(PreTrainedConfig):
    """The configuration of a converted decoder, as it is saved.

    base: of the model as transformers has it, with `model_type`. made_from: the name of its class
    in transformers. structure: where its layers and norms are. stream: the options of the
    conversion. A converted model in memory has the configuration of its base.
    """

    model_type = DECODER_MODEL_TYPE

    def __init__(
        self,
        base: dict[str, Any] | None = None,
        made_from: str | None = None,
        structure: dict[str, Any] | None = None,
        stream: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        self.base, self.made_from = base or {}, made_from
        self.structure, self.stream = structure or {}, stream or {}
        super().__init__(**kwargs)

    @classmethod
    def of(cls, model: Any) -> DDLDecoderConfig:
        """That of a converted model."""
        kind = type(model).made_of[1]
        options = {name: model.options[name] for name in sorted(model.options)}
        return cls(model.config.to_dict(), kind.__name__, model.structure._asdict(), options)

    @property
    def of_base(self) -> PreTrainedConfig:
        """The configuration of the model as transformers has it."""
        fields = {name: value for name, value in self.base.items() if name != "model_type"}
        made: PreTrainedConfig = AutoConfig.for_model(self.base["model_type"], **fields)
        if self.dtype is not None:
            made.dtype = self.dtype
        attention = getattr(self, "_attn_implementation_internal", None)
        if attention is not None:
            made._attn_implementation = attention
        return made

    @property
    def kind(self) -> Any:
        """The class in transformers of the model before it was converted.

        Raises InputError if the installed transformers has none of this name.
        """
        import transformers

        found = getattr(transformers, str(self.made_from), None)
        if found is None or "model_type" not in self.base:
            must = "name a class of the installed transformers"
            raise InputError("made_from", must, repr(self.made_from))
        return found

    @property
    def parts(self) -> Structure:
        """`structure` as a Structure."""
        found = dict(self.structure)
        return Structure(**{**found, "norms": tuple(found["norms"])})

    def to_dict(self) -> dict[str, Any]:
        return {**super().to_dict(), "architectures": [ARCHITECTURE]}
